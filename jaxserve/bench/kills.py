"""`python -m jaxserve.bench kills`: an ffn worker is killed again and again while requests run.

`launch/local.py --runtimes` serves a deployment on this host; clients stream completions without a
pause, greedily, and every completion must be, token for token, what the same prompt gave before the
first kill. In the middle of it the ffn worker in use gets SIGKILL. The gap of a kill is the longest
time without a token on any stream from the kill until the worker's successor has answered.
"""

import asyncio
import functools
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.bench.client import Client
from jaxserve.bench.launched import Launched, Process
from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    describe_machine,
    missed,
    table,
    this_machine,
    write_json,
)

PROMPTS = (
    "def fibonacci(n):",
    "class Stack:",
    "import os",
    "for i in range(",
    "# sort",
    "x =",
    "if __name__",
    "return",
)
TOKENS = 128
START_SECONDS, REQUEST_SECONDS = 240.0, 120.0
RESTART_LIMIT, STANDBY_LIMIT = 3.0, 0.3
"""Of the longest gap, seconds."""
PAUSE = 1.0
"""Of undisturbed running between a successor's readiness and the next kill."""


class Stream:
    """Completions of one prompt, one after the other, and the times of their events."""

    def __init__(self, url: str, prompt: str):
        self._client = Client(url, seconds=REQUEST_SECONDS)
        self._body = msgspec.json.encode(
            {
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        self.expected = ""
        self.arrivals: list[float] = []
        self.completions = self.wrong = 0
        self.errors: list[str] = []

    async def once(self) -> str:
        """One completion's text."""
        outcome = await self._client.complete(self._body)
        self.arrivals += [outcome.start + arrival for arrival in outcome.arrivals]
        if outcome.error or outcome.tokens != TOKENS:
            self.errors.append(outcome.error or f"{outcome.tokens} tokens")
        return outcome.text

    async def run(self, until: asyncio.Event) -> None:
        """Completions without a pause, compared with the first."""
        while not until.is_set():
            text = await self.once()
            self.completions += 1
            self.wrong += text != self.expected


async def storm(deployment: Launched, kills: int, standbys: int) -> dict[str, Any]:
    """Runs the clients through all kills."""
    url = f"http://{deployment.addresses()['http']}"
    streams = [Stream(url, prompt) for prompt in PROMPTS]
    for stream in streams:
        stream.expected = await stream.once()
    over = asyncio.Event()
    running = [asyncio.create_task(stream.run(over)) for stream in streams]
    killed: list[float] = []
    try:
        for number in range(kills):
            await asyncio.sleep(PAUSE)
            # With a standby the two take turns: the one in use is killed.
            worker = deployment.processes[1 + number % (1 + standbys)]
            again = functools.partial(_was_ready, worker, worker.starts + 1)
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(time.perf_counter())
            await asyncio.to_thread(deployment.wait, again, START_SECONDS, "a successor's start")
        await asyncio.sleep(PAUSE)
    finally:
        over.set()
        _, hung = await asyncio.wait(running, timeout=REQUEST_SECONDS)
    return {
        "gaps": gaps(killed, [at for stream in streams for at in stream.arrivals]),
        "completions": sum(stream.completions for stream in streams),
        "wrong": sum(stream.wrong for stream in streams),
        "errors": [error for stream in streams for error in stream.errors],
        "hung": len(hung),
    }


def _was_ready(worker: Process, times: int) -> bool:
    return worker.ready >= times


def gaps(killed: Sequence[float], arrivals: Sequence[float]) -> list[float]:
    """After every kill the longest time without an event on any stream, until the next kill."""
    ordered, found = sorted(arrivals), []
    for at, end in zip(killed, [*killed[1:], float("inf")], strict=True):
        near = [at, *(arrival for arrival in ordered if at < arrival < end)]
        steps = [later - earlier for earlier, later in itertools.pairwise(near)]
        found.append(max(steps, default=float("inf")))
    return found


def run(config: Path, kills: int, standbys: int, sets: Sequence[str], file: Path | None) -> int:
    """Measures and prints; 1 if a target is missed."""
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    command = ["--runtimes", "--standbys", f"{standbys}", "--config", str(config)]
    for setting in (*sets, "server.grpc_port=0", "server.http_port=0"):
        command += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="jaxserve-kills-") as folder:
        deployment = Launched(command, Path(folder))
        try:
            there = 2 + standbys
            deployment.wait(
                lambda: len(deployment.processes) == there and deployment.whole(),
                START_SECONDS,
                "the start of all processes",
            )
            found = asyncio.run(storm(deployment, kills, standbys))
        finally:
            deployment.end()
    ordered = sorted(found["gaps"])
    limit = STANDBY_LIMIT if standbys else RESTART_LIMIT
    measures = [
        Measure("completions", found["completions"]),
        Measure("wrong completions", found["wrong"], "", 0),
        Measure("requests that failed", len(found["errors"]), "", 0),
        Measure("requests that hung", found["hung"], "", 0),
        Measure("gap, median", statistics.median(ordered), "s"),
        Measure("gap, longest", ordered[-1], "s", limit),
    ]
    how = f"{standbys} standing by" if standbys else "started again"
    title = f"{kills} kills of the ffn worker in use, {how}"
    notes = [f"{len(PROMPTS)} streams of {TOKENS} tokens, greedy, {config.name}, {' '.join(sets)}"]
    notes += sorted(set(found["errors"]))[:3]
    part = Part("kills", title, measures, notes, found)
    print(f"\n{table(part)}", flush=True)
    if file is not None:
        write_json(file, Report("kills", False, machine, [part]))
    return int(bool(missed([part])))

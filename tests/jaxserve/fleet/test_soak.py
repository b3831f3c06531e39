"""Many requests of random lengths through a router, two prefill workers and a domain, over HTTP; a
tenth of them cancelled at a random moment. Nothing of them is left on any process afterwards."""

import contextlib
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.jaxserve import layouts
from tests.jaxserve.fleet.launched import Launched
from tests.jaxserve.fleet.test_fleet_processes import write_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.multihost, pytest.mark.unoptimised]

REQUESTS = 2000
CANCELLED = 0.1
AT_A_TIME = 32
SECONDS = 600
PREFILLS = 2
OVERRIDES = layouts.LIMITS | {
    "mode": "colocated",
    "scheduler.max_waiting": 200,
    "prefill.workers": PREFILLS,
    "server.grpc_port": 0,
    "server.http_port": 0,
}
LEFT_OPEN = 4
"""Descriptors and threads more than at the first count are none that requests have left."""


class Load:
    """Requests against one address, and what came of them."""

    def __init__(self, address: str, seed: int):
        limits = httpx.Limits(max_connections=2 * AT_A_TIME, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=f"http://{address}", timeout=SECONDS, limits=limits)
        self._draw = random.Random(seed)
        self.texts: dict[int, set[str]] = {}
        self.answered = self.cancelled = 0
        self.prompts = [self._prompt() for _ in range(40)]

    def _prompt(self) -> tuple[list[int], int]:
        """Token ids and how many tokens are wanted; short ones are more frequent."""
        length = int(2 * 45 ** self._draw.random())
        vocab = layouts.SIZES.vocab_size
        return [self._draw.randrange(2, vocab) for _ in range(length)], self._draw.randrange(1, 25)

    def run(self, count: int) -> None:
        """So many requests, `AT_A_TIME`; raises what any of them raises."""
        plans = []
        for _ in range(count):
            after = 2 * self._draw.random() ** 2 if self._draw.random() < CANCELLED else None
            plans.append((self._draw.randrange(len(self.prompts)), after))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for number, text in pool.map(self._one, plans):
                if text is None:
                    self.cancelled += 1
                else:
                    self.answered += 1
                    self.texts.setdefault(number, set()).add(text)

    def _one(self, plan: tuple[int, float | None]) -> tuple[int, str | None]:
        number, after = plan
        prompt, tokens = self.prompts[number]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        if after is None:
            answer = self._http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return number, answer.json()["choices"][0]["text"]
        end = time.monotonic() + after
        options: dict[str, Any] = {"json": body | {"stream": True}}
        options["timeout"] = httpx.Timeout(SECONDS, read=max(after, 0.001))
        with (
            contextlib.suppress(httpx.ReadTimeout),
            self._http.stream("POST", "/v1/completions", **options) as stream,
        ):
            for _ in stream.iter_lines():
                if time.monotonic() > end:
                    break
        return number, None

    def at_rest(self) -> None:
        """Waits until no worker has a request, a hold, a page or a hand-off in hand."""
        end = time.monotonic() + 60
        while busy := self._busy():
            assert time.monotonic() < end, busy
            time.sleep(0.2)

    def _busy(self) -> list[dict[str, Any]]:
        load = self._http.get("/pipeline").json()["load"]
        assert len(load["workers"]) == PREFILLS + 1
        return [
            worker
            for worker in [load, *load["workers"]]
            if worker["running"]
            or worker["waiting"]
            or worker["held"]
            or worker.get("routed")
            or any(worker["kv_usage"])
            or worker["hand_offs"]["queued"]
            or worker["hand_offs"]["registered_bytes"]
        ]

    def close(self) -> None:
        self._http.close()


def counts(pids: dict[str, str]) -> dict[str, tuple[int, int]]:
    """File descriptors and threads of every process."""
    return {
        process: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
        for process, pid in pids.items()
    }


def test_requests_leave_nothing_behind(tiny_model: Path, tmp_path: Path):
    model = tmp_path / "tiny"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    write_tokenizer(model)
    command = ["launch/local.py", "--fleet", "--model", str(model)]
    for key, value in OVERRIDES.items():
        command += ["--set", f"{key}={value}"]
    run = Launched(command, {"JAX_PLATFORMS": "cpu"})
    load = None
    try:
        address = run.wait_for(r"^\[0\] ready .* http=(\S+)", SECONDS)[1]
        for process in range(1, PREFILLS + 2):
            run.wait_for(rf"^\[{process}\] ready ", SECONDS)
        pids = dict(re.findall(r"process (\d): .*, pid (\d+)", run.output))
        load = Load(address, seed=5)
        load.run(REQUESTS // 2)
        load.at_rest()
        before = counts(pids)
        load.run(REQUESTS // 2)
        load.at_rest()
        after = counts(pids)
        assert load.answered + load.cancelled == REQUESTS
        assert 0.05 * REQUESTS < load.cancelled < 0.15 * REQUESTS
        assert {len(texts) for texts in load.texts.values()} == {1}  # equal prompts, equal texts
        for process, known in before.items():
            for was, now in zip(known, after[process], strict=True):
                assert now <= was + LEFT_OPEN, (process, before, after)
        run.process.send_signal(signal.SIGTERM)
        assert run.end(SECONDS) == 0, run.output
        assert "Traceback" not in run.output
    finally:
        if load is not None:
            load.close()
        if run.process.poll() is None:
            run.process.kill()
            run.end(5.0)

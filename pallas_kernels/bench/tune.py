"""Tunes tile sizes on the device present: `python -m pallas_kernels.bench --tune`.

Each candidate is run by a process of its own (`trial.py`), checked against the reference and timed;
one that fails, hangs or breaks the device is skipped with the reason. What was tried is kept in a
file, so that a search that is run again goes on where it ended. The best go into `OP/tuned.json`,
for a person to review.
"""

import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from pallas_kernels.bench.search import (
    OutOfTime,
    Settings,
    Sizes,
    Trials,
    changes,
    map_sizes,
    report,
    search,
    to_sizes,
)

START_SECONDS = 600.0
"""Time for a process to list the calls that have tiles."""


class Worker:
    """The process that tries, started again when it did not answer in time or died."""

    def __init__(self, arguments: list[str]):
        self.command = [sys.executable, "-m", "pallas_kernels.bench.trial", *arguments]
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.about = self._start()

    def _start(self) -> dict[str, Any]:
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        self.process, self.lines = process, lines
        found = self._answer(START_SECONDS)
        if "failed" in found:
            raise RuntimeError(f"{' '.join(self.command)}: {found['failed']}")
        return found

    def _answer(self, limit: float) -> dict[str, Any]:
        """Returns the next line of JSON, and skips everything else that the process prints."""
        end = time.monotonic() + limit
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.0))
            except queue.Empty:
                self.stop()
                return {"failed": f"over {limit:.0f} s"}
            if line is None:
                self.stop()
                return {"failed": "the process died"}
            if line.startswith("{"):
                return json.loads(line)

    def attempt(self, case: str, tiles: Mapping[str, Sizes], limit: float) -> dict[str, Any]:
        """Returns the seconds, or the reason why the attempt failed."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"case": case, "tiles": tiles}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return {"failed": "the process died"}
        return self._answer(limit)

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def tune_on_device(ops: list[str], names: list[str] | None, settings: Settings) -> int:
    """Searches on the device present. Returns 1 if no call has tiles, or time ran out."""
    arguments = ["--op", *ops, *(["--case", *names] if names else [])]
    worker = Worker(arguments + (["--quick"] if settings.quick else []))
    about, trials = worker.about, Trials(settings.trials)
    end = time.monotonic() + settings.seconds
    for label, why in about["skipped"].items():
        print(f"{label}: skipped: {why}")
    if not about["calls"]:
        print(f"nothing to tune on {about['device_kind']}: no kernel with tiles of its own runs")
        worker.stop()
        return 1
    identity = {key: about[key] for key in ("device_kind", "jax")} | {"quick": settings.quick}

    def seconds_of(call: str, label: str, tiles: Sizes) -> float:
        def run() -> dict[str, Any]:
            if end - time.monotonic() < settings.candidate_seconds:
                raise OutOfTime
            return worker.attempt(label, {call: tiles}, settings.candidate_seconds)

        trial = {**identity, "case": label, "call": call, "tiles": tiles}
        result = trials.get(trial, run)
        if "failed" in result:
            print(f"  {label} {changes(tiles, start)}: {result['failed']}")
        return result.get("seconds", math.inf)

    unfinished = 0
    try:
        for call, entry in about["calls"].items():
            start = to_sizes(entry["tiles"])
            choices = entry["choices"]
            if settings.quick:
                choices = {field: some[:2] for field, some in list(choices.items())[:1]}
            try:
                labels = [
                    label
                    for label in entry["cases"]
                    if math.isfinite(seconds_of(call, label, start))
                ]
            except OutOfTime:
                unfinished += 1
                break

            def cost(tiles: Sizes, call: str = call, labels: list[str] = labels) -> float:
                """Geometric mean over the sizes at which the call appears."""
                times = [seconds_of(call, label, tiles) for label in labels]
                return math.exp(sum(map(math.log, times)) / len(times))

            if labels:
                found = search(start, {f: map_sizes(c) for f, c in choices.items()}, cost)
                report(call, entry, found, about["device_kind"], settings)
                unfinished += not found.finished
    finally:
        worker.stop()
    if unfinished:
        print(f"time is up: the same command goes on from {settings.trials}")
    return 1 if unfinished else 0

"""`serve` from the command to its `ready` line, with an empty and with a full compile cache.

Part of `bench pipeline`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO
from jaxserve.bench.workers import BenchError
from jaxserve.commands.children import end, started

COLD_LIMIT, WARM_LIMIT = 40.0, 15.0
_SECONDS = 900.0
"""Deadline of one start: a machine with other work may take twenty times as long as an idle one."""


def measure(quick: bool) -> Iterator[Part]:
    """Starts `serve` cold once and warm once (three times unless quick)."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as cache:
        cold = start(cache)
        warm = min((start(cache) for _ in range(1 if quick else 3)), key=lambda run: run["ready"])
    measures = [
        Measure("cold compile cache", cold["ready"], "s", COLD_LIMIT),
        Measure("warm compile cache", warm["ready"], "s", WARM_LIMIT),
    ]
    for state, run in (("cold", cold), ("warm", warm)):
        measures += [
            Measure(f"  {name}, {state}", run[name], "s") for name in run if name != "ready"
        ]
    notes = ["From exec to `ready`. Warm: the fastest of the runs that find the first one's cache."]
    title = "python -m jaxserve.serve --config configs/demo.yaml, to ready"
    yield Part("startup", title, measures, notes, {"cold": cold, "warm": warm})


def start(cache: str) -> dict[str, float]:
    """Starts `serve`, and ends it with SIGTERM. Returns the seconds from exec until it is ready, in
    total and by part.

    Raises:
      BenchError: it ended before it was ready, or is late.
    """
    command = [sys.executable, "-u", "-m", "jaxserve.serve", "--config", str(DEMO)]
    command += ["--set", "server.grpc_port=0", "--set", "server.http_port=0"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(Path(cache)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    begin = time.monotonic()
    process = started(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    late = threading.Timer(_SECONDS, end, [process])
    late.start()
    lines: list[str] = []
    seconds: dict[str, float] = {}
    compiled = 0.0
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            now = time.monotonic() - begin
            if took := re.search(r"(load|compile): .* in ([\d.]+) s", line):
                name, own = took[1], float(took[2])
                seconds.setdefault("imports and server", now - own)
                seconds[name] = seconds.get(name, 0.0) + own  # each role has its own
                compiled = now
            if line.startswith("ready"):
                seconds |= {"warm-up": now - compiled, "ready": now}
                process.send_signal(signal.SIGTERM)
        process.wait(_SECONDS)
    finally:
        late.cancel()
        end(process)
        process.stdout.close()
    if "ready" not in seconds:
        raise BenchError("serve never got ready:\n" + "".join(lines[-20:]))
    return seconds

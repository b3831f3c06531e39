"""`serve` from the command to its `ready` line, with an empty and with a full compile cache.

Part of `bench pipeline`.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.requests import DEMO
from jaxserve.bench.workers import BenchError, wait_until
from jaxserve.commands.children import Child

COLD_LIMIT, WARM_LIMIT = 40.0, 15.0
_SECONDS = 900.0  # a busy machine takes twenty times as long as an idle one


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
    """Starts `serve`, and ends it. Returns the seconds from exec until it is ready, and the parts
    that loading and compiling took, as it prints them for each role.

    Raises:
      BenchError: it ended before it was ready, or is late.
    """
    command = ["-u", "-m", "jaxserve.serve", "--config", str(DEMO)]
    command += ["--set", "server.grpc_port=0", "--set", "server.http_port=0"]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(Path(cache)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        begin = time.monotonic()
        child = Child(command, Path(folder, "said.txt"), environment=environment)
        try:
            wait_until(lambda: child.code or _ready(child), _SECONDS, "serve")
            seconds = {"ready": time.monotonic() - begin, "load": 0.0, "compile": 0.0}
            if not _ready(child):
                raise BenchError("\n".join(["serve never got ready:", *child.last_words(20)]))
        finally:
            child.end()
        for name, took in re.findall(r"(load|compile): .* in ([\d.]+) s", child.output.read_text()):
            seconds[name] += float(took)
    return seconds | {"the rest": 2 * seconds["ready"] - sum(seconds.values())}


def _ready(child: Child) -> bool:
    return "\nready" in child.output.read_text()

"""Python imports this first: a wall clock that jumps by as much as a file says.

Only `jaxserve.chaos` puts its folder on the path of the processes that it starts. What is written
in C (XLA, gRPC) keeps the real clock.
"""

import os
import time


def _install(path: str) -> None:
    real, real_ns = time.time, time.time_ns

    def jump() -> float:
        try:
            with open(path) as file:
                return float(file.read() or 0.0)
        except (OSError, ValueError):
            return 0.0

    time.time = lambda: real() + jump()
    time.time_ns = lambda: real_ns() + int(jump() * 1e9)


if "JAXSERVE_CHAOS_CLOCK" in os.environ:
    _install(os.environ["JAXSERVE_CHAOS_CLOCK"])

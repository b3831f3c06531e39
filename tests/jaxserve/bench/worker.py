"""Functions that the tests run in processes of their own."""

import sys
import time

from jaxserve.bench.workers import asked, say


def work(mode: str) -> dict[str, str]:
    """In a worker: does what its argument says."""
    if mode == "fail":
        sys.exit("no luck")
    if mode == "sleep":
        time.sleep(600)
    return {"mode": mode}


def repeat(times: int) -> None:
    """In a helper: answers one question."""
    say(times * next(asked()))

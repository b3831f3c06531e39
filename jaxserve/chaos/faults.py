"""Makes a fault happen, and ends it.

Used by `storm.py`.
"""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import cast

from jaxserve.chaos.deployment import Process, RunningDeployment
from jaxserve.chaos.proxy import Disturbance
from jaxserve.chaos.schedule import Fault

TURN_SECONDS = 0.1
"""Period of a slow process, which is stopped for a part of each."""


@contextlib.contextmanager
def happening(fault: Fault, victim: Process, deployment: RunningDeployment) -> Iterator[None]:
    """Has the fault happen while the block runs."""
    pid = victim.pid
    match fault.kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
            yield
        case "end":
            os.kill(pid, signal.SIGTERM)
            yield
        case "stop":
            with _continued(pid):
                os.kill(pid, signal.SIGSTOP)
                yield
        case "slow":
            over = threading.Event()
            thread = threading.Thread(target=_slow, args=(pid, fault.size, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        case "drop" | "delay" | "corrupt":
            proxy = deployment.proxies[victim.dialled]
            proxy.disturb(cast(Disturbance, fault.how or fault.kind), fault.size)
            try:
                yield
            finally:
                proxy.disturb("")
        case "disk":
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
            try:
                yield
            finally:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        case _:
            raise ValueError(fault.kind)


@contextlib.contextmanager
def _continued(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _slow(pid: int, part: float, over: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError), _continued(pid):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(part * TURN_SECONDS)
            os.kill(pid, signal.SIGCONT)
            over.wait((1 - part) * TURN_SECONDS)

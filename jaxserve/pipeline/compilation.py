"""Counts what this process compiles once its programs are warm: while it serves, nothing may be.

Wired in by `engine/build.py` after the warm-up. A program that comes out of the compile cache on
disk counts too: it was missing in memory, and its step waited for it.
"""

import logging
import threading
import weakref

import jax

logger = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's name of the event, which says what was compiled and for how many seconds."""


class CompilationCounter:
    """Counts from the moment it is made, on all threads, and warns of each.

    Attributes:
      count: compilations so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._stopped = False
        _listen()
        with _lock:
            _counters.add(self)

    def stop(self) -> None:
        """Counts no more: others may compile in this process now."""
        self._stopped = True

    def compiled(self, name: str, seconds: float) -> None:
        """Notes one."""
        if self._stopped:
            return
        self.count += 1
        logger.warning(
            "compiled %s in %.2f s after the engine was ready (%d so far): a step met a shape, "
            "type or sharding that was not warmed up",
            *(name, seconds, self.count),
        )


# JAX keeps a listener for ever, so there is one, which knows the counters that are still in use.
_lock = threading.Lock()
_counters: "weakref.WeakSet[CompilationCounter]" = weakref.WeakSet()
_listening = False


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _listening = True


def _on_event(event: str, duration_secs: float, **details: str | int) -> None:
    if event != COMPILED:
        return
    with _lock:
        counters = list(_counters)
    for counter in counters:
        counter.compiled(str(details.get("fun_name", "a program")), duration_secs)

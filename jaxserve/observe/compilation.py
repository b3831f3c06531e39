"""Counts compilations after warm-up: while the step loop serves, there should be none.

The engine counts on the thread of its step loop. A program loaded from the compile cache on disk
counts too: it was missing in memory, and its step waited for it.
"""

import logging
import threading
import weakref

import jax

logger = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's monitoring event for a compilation, with the name of the program and its duration."""


class CompilationCounter:
    """Counts compilations from its creation on, and logs a warning for each.

    Args:
      thread: the thread to count on, as others may be building another engine; None: all threads.

    Attributes:
      count: compilations so far.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self.count = 0
        self._thread = thread
        self._stopped = False
        _listen()
        with _lock:
            _counters.add(self)

    def stop(self) -> None:
        """Stops counting."""
        self._stopped = True

    def compiled(self, name: str, seconds: float) -> None:
        """Called for every compilation, on the thread that compiled."""
        elsewhere = self._thread not in (None, threading.current_thread())
        if self._stopped or elsewhere:
            return
        self.count += 1
        logger.warning(
            "compiled %s in %.2f s after the engine was ready (%d so far): a step met a shape, "
            "type or sharding that was not warmed up",
            *(name, seconds, self.count),
        )


# JAX never drops a listener, so there is one for all counters that are in use.
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

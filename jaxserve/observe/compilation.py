"""Counts compilations after warm-up: while the step loop serves, there should be none.

The engine counts on the thread of its step loop. A program loaded from the compile cache on disk
counts too: it was missing in memory, and its step waited for it.
"""

import logging
import threading

import jax

logger = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's monitoring event for a compilation, with the name of the program and its duration."""


class CompilationCounter:
    """Counts compilations until it is stopped, and logs a warning for each.

    Args:
      thread: the thread to count on, as others may be building another engine; None: all threads.

    Attributes:
      count: compilations so far.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self.count = 0
        self._thread = thread
        self._stopped = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def stop(self) -> None:
        """Stops counting."""
        if not self._stopped:
            self._stopped = True
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        """Called by JAX for every event, on the thread that compiled."""
        if event != COMPILED or self._thread not in (None, threading.current_thread()):
            return
        self.count += 1
        logger.warning(
            "compiled %s in %.2f s after the engine was ready (%d so far): a step met a shape, "
            "type or sharding that was not warmed up",
            *(details.get("fun_name", "a program"), duration_secs, self.count),
        )

"""Progress of long start-up activities: loading weights (k of N, GB, GB/s) and compiling (k of N).

Used by checkpoint readers and by the compilation of executables. On the terminal of process 0 it is
one line that updates in place; elsewhere plain log lines, at most one every two seconds and one at
the end. It knows neither JAX nor what is being counted.
"""

import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_LOGGER = logging.getLogger("jaxserve.progress")
_TERMINAL_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 2.0
_CLEAR_LINE = "\r\x1b[2K"

_advances = 0
_advances_lock = threading.Lock()


def advances() -> int:
    """Number of advances of all activities of this process. Processes that wait for this one take
    it for stuck when the number stands still."""
    return _advances


def advanced() -> None:
    """Counts an advance of an activity that is not shown."""
    global _advances
    with _advances_lock:
        _advances += 1


class Progress:
    """Counts one activity and shows it; a context manager, usable from several threads.

    Args:
      what: the activity, as the line starts with it ("load", "compile").
      total: number of items.
      total_bytes: Size of all items in bytes. Without it the size is estimated from the items
        that are done, once bytes have been counted.
      process: index of this process; only process 0 draws on a terminal.
      stream: where a terminal line goes; standard error unless given.
      clock: seconds, monotonic.

    Example:
      with Progress("load", total=len(files), total_bytes=size, process=jax.process_index()) as p:
          for file in files:
              ...
              p.advance(size=file.size, note=file.name)
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        total_bytes: int | None = None,
        process: int = 0,
        stream: io.TextIOBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._total_bytes = total_bytes
        self._stream: TextIO | io.TextIOBase = sys.stderr if stream is None else stream
        self._on_terminal = process == 0 and self._stream.isatty()
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._bytes = 0
        self._note = ""
        self._started = self._shown = clock()

    def advance(self, count: int = 1, *, size: int = 0, note: str = "") -> None:
        """Counts `count` more items of `size` bytes together; `note` names the latest."""
        advanced()
        with self._lock:
            self._count += count
            self._bytes += size
            self._note = note
            now = self._clock()
            interval = _TERMINAL_INTERVAL_S if self._on_terminal else _LOG_INTERVAL_S
            if now - self._shown >= interval:
                self._shown = now
                self._show(now)

    def set(self, count: int, total: int, note: str = "") -> None:
        """Sets both counts, where the total was not known before."""
        with self._lock:
            self._total = total
            count -= self._count
        self.advance(count, note=note)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Shows the final state; after an error it says that the activity stopped there."""
        with self._lock:
            now = self._clock()
            self._note = f"in {now - self._started:.1f} s" if kind is None else "stopped"
            if kind is None and self._total_bytes is not None:
                self._total_bytes = self._bytes  # what nobody needed was not read
            self._show(now, left=False)
            if self._on_terminal:
                self._stream.write("\n")
                self._stream.flush()

    def _show(self, now: float, *, left: bool = True) -> None:
        line = self._line(now, left)
        if self._on_terminal:
            self._stream.write(_CLEAR_LINE + line)
            self._stream.flush()
        else:
            _LOGGER.info("%s", line)

    def _line(self, now: float, left: bool) -> str:
        parts = [f"{self._what}: {self._count} of {self._total}"]
        if self._total_bytes is not None or self._bytes:
            whole = self._total_bytes or self._bytes * self._total / max(self._count, 1)
            known = self._total_bytes is not None or bool(self._count)
            rate = self._bytes / max(now - self._started, 1e-9)
            unit, size = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)
            of_whole = f" of {whole / size:.2f}" if known else ""
            parts.append(f"{self._bytes / size:.2f}{of_whole} {unit}")
            parts.append(f"{rate / size:.2f} {unit}/s")
            if left and known and rate > 0:
                parts.append(f"{(whole - self._bytes) / rate:.0f} s left")
        if self._note:
            parts.append(self._note)
        return ", ".join(parts)

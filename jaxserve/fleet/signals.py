"""Signals that end a process which belongs to a larger whole."""

import os
import signal
from collections.abc import Callable
from types import FrameType


def on_signals(ask: Callable[[str], bool]) -> list[int]:
    """Handles SIGTERM and SIGINT: the first one asks for an orderly end, the second one ends this
    process at once. Returns the list of the signals that have come, which grows.

    Args:
      ask: asks for the end, with the name of the signal as the reason; False if it cannot yet,
        because this process is starting, which then exits.
    """
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        if not ask(signal.Signals(number).name):
            raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return signals

"""Messages between a process and the service manager or launcher that started it."""

import contextlib
import os
import re
import signal
import socket
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


def tell_ready() -> None:
    """Tells the service manager or launcher that this process is ready, as sd_notify(3) does."""
    address = re.sub("^@", "\0", os.environ.get("NOTIFY_SOCKET", ""))  # a name without a file
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"READY=1", socket.MSG_DONTWAIT, address)  # an error if nobody listens

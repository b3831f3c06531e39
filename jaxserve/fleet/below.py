"""The session of a process that gets plans from this one: it is told without waiting for it.

The engine's thread sends a boundary to every process directly below with one system call each. A
peer that reads slowly delays no other: another thread sends the rest of its messages. Used by the
leader (`leader.py`) and by followers that hand its messages on (`follower.py`).
"""

import contextlib
import select
import threading

import msgspec

from jaxserve.fleet import control
from jaxserve.link.session.messages import encode
from jaxserve.link.session.served import ServedSession

HELLO_SECONDS = 10.0
"""Seconds within which a follower proves its token and registers."""
LOOK_SECONDS = 0.4
"""Seconds between two looks at a process that reads nothing."""


class Below(ServedSession):
    """A process directly below this one."""

    greeting = control.Register

    def send(self, message: msgspec.Struct) -> None:
        """See `Session`; never waits for the peer."""
        self.post(encode(message))

    def post(self, body: bytes) -> None:
        """Sends an encoded message, behind what was sent before."""
        try:
            waits = self._channel.post(body)
        except OSError:  # the thread that reads says why
            return
        if waits:
            threading.Thread(target=self._catch_up, name="catch up", daemon=True).start()

    def _catch_up(self) -> None:
        """Sends what waits for room, until nothing does or the connection has ended."""
        room = select.poll()
        room.register(self._channel.descriptor, select.POLLOUT)
        with contextlib.suppress(OSError):
            while self._channel.unsent and self.failure is None:
                room.poll(LOOK_SECONDS * 1000)
                self._channel.flush()

"""A session: one connection between two workers, from the hello to its loss.

Base of links between runtimes, of hand-offs and of weights. The end that dials introduces itself
(`greet.py`), the other one answers (`served.py`); then one thread reads frames and hands each
message to its handler, and any thread sends. The end that dialled sends signs of life. Silence, a
late hello, a frame of no message in the table and a lost connection all end the session through
`Session.fail`.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.link.session.channel import LONGEST_TICK_SECONDS, TICK_SECONDS, Channel, Deadlines
from jaxserve.link.session.messages import Echo, Greeting, Refused, decoder, encode


class Session:
    """A connection whose two ends know each other. Any thread may send, and `fail` it.

    Args:
      channel: authenticated; this session's from now on.

    Attributes:
      failure: why it has ended; None while it lives. The first reason counts.
      silent: seconds since the last frame of the other end.
    """

    greeting: ClassVar[type[Greeting]]
    """First frame of the other end."""
    handlers: ClassVar[Mapping[type[msgspec.Struct], Callable[..., None]]]
    """The table of messages that this end receives, and what it does with each."""
    _decoder: ClassVar[msgspec.msgpack.Decoder[Any]]
    returns_echoes: ClassVar = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "handlers"):
            cls._decoder = decoder(Echo, Refused, cls.greeting, *cls.handlers)

    def __init__(self, channel: Channel, deadlines: Deadlines):
        self.failure: str | None = None
        self.silent = 0.0
        self._channel, self._deadlines = channel, deadlines
        self._failing = threading.Lock()
        self._clock = AwakeClock(LONGEST_TICK_SECONDS)
        self._heard = self._echoed = 0.0

    @classmethod
    def decode(cls, data: bytes) -> Any:
        """Returns a frame's message; raises msgspec.DecodeError for anything but one of the table,
        a sign of life, or the other end's greeting."""
        return cls._decoder.decode(data)

    def fail(self, reason: str) -> None:
        """Gives the session up; the first reason counts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        self._channel.shutdown()
        self._drop()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message without bytes behind it; raises OSError when the connection is gone."""
        self._channel.send(encode(message))

    def live(self) -> None:
        """Runs until the connection's loss, on this thread."""
        try:
            self.read()
        finally:
            self.end()

    def end(self) -> None:
        """Frees the connection, once no thread reads any more."""
        self.fail("closed here")
        self._channel.close()

    def read(self) -> None:
        """Reads, and watches deadlines, until the session has failed."""
        while self.failure is None:
            self.read_frame()

    def read_frame(self, seconds: float | None = TICK_SECONDS) -> bool:
        """Handles the next frame, if it comes within `seconds`, and watches deadlines; called by
        one thread at a time. Returns whether a frame came.

        Args:
          seconds: longest wait; None: bytes have come.
        """
        try:
            if came := self._channel.wait(seconds):
                self.handle(self._channel.receive())
            self._tick(self._clock.tick())
            return came
        except (EOFError, OSError) as error:
            self.fail(f"the connection closed ({error or 'end of file'})")
        except (RuntimeError, msgspec.DecodeError) as error:
            self.fail(str(error))
        return False

    def handle(self, body: bytes) -> None:
        """Handles a frame of the other end, which is a sign of life."""
        self._heard = self._clock.now
        self._take(self.decode(body))

    def _drop(self) -> None:
        """Wakes threads that wait for the other end, once the session has failed."""

    def _limit(self) -> float:
        """Returns the seconds of silence that are allowed just now."""
        return self._deadlines.down

    def _take(self, frame: msgspec.Struct) -> None:
        handler = self.handlers.get(type(frame))
        if handler is not None:
            handler(self, frame)
        elif not isinstance(frame, Echo):
            self.fail(f"unexpected {type(frame).__name__}")
        elif self.returns_echoes:
            self.send(frame)

    def _tick(self, now: float) -> None:
        """Watches deadlines, after every frame and several times a second."""
        self.silent = now - self._heard
        if self.silent > self._limit():
            self.fail(f"silent for {self.silent:.1f} s")
        elif not self.returns_echoes and now - self._echoed >= self._deadlines.probe:
            self._echoed = now
            self.send(Echo(0))

"""The prefill worker's end of a pages link: hands out pages that its engine holds.

Decode workers connect and ask for token ranges of leases, piece by piece. For each there are two
threads: one reads frames, so that a decode worker hears an echo and renews its leases while the
other waits for the engine and for room, and sends pieces. A piece is a copy of pages in the wire
form; its bytes are bounded over all connections, and are free again when it is sent or the
connection ends. `client.py` is the other end. Knows nothing of requests and pages.
"""

import contextlib
import logging
import queue
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ClassVar, NamedTuple, Protocol

from jaxserve.clock import AwakeClock
from jaxserve.link.bulk import on_host, send_arrays
from jaxserve.link.pages import frames
from jaxserve.link.pages.frames import CACHE_FORMAT, PagesError, Piece
from jaxserve.link.pages.source import PagesLoad
from jaxserve.link.session.channel import (
    DEFAULT_DEADLINES,
    LONGEST_TICK_SECONDS,
    TICK_SECONDS,
    Channel,
    Deadlines,
)
from jaxserve.link.session.hello import Hello, facts_digest
from jaxserve.link.session.listener import Listener, listen
from jaxserve.link.session.messages import Failed, Join, Ready, encode
from jaxserve.link.session.working import WorkingSession

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
REGISTERED_BYTES = 1 << 30
"""Most bytes of pieces that are read or sent, over all connections; one piece is always allowed."""
READ_AHEAD = 1
"""Pieces of a connection that the engine reads ahead while another one is sent."""


class Holder(Protocol):
    """Holder of the pages: the engine. Any thread may call it; no call waits."""

    def export(self, fetch: frames.Fetch, reply: "Future[Piece]") -> None:
        """Reads a piece. The future gets it, perhaps still being computed, or an PagesError."""
        ...

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins these leases anew."""
        ...

    def release_hand_off(self, hand_off: str) -> None:
        """Ends this lease."""
        ...


class PagesServer:
    """Serves any number of decode workers.

    Args:
      address: address to listen on; port 0 takes a free one.
      hello: this worker's facts; decode workers with other facts are refused.
      token: the secret of the deployment.
      holder: holder of the pages.
      token_bytes: bytes of a token's entries on the wire.
      registered_bytes: most bytes of pieces that are read or sent.
      checksums: whether pieces are sent with checksums.
      deadlines: deadlines of all waits.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        token: str,
        holder: Holder,
        *,
        token_bytes: int,
        registered_bytes: int = REGISTERED_BYTES,
        checksums: bool = True,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ):
        self.hello, self.holder = hello, holder
        self.model, (self.cache_format, _) = facts_digest(hello.facts), hello.formats[CACHE_FORMAT]
        self.deadlines, self.checksums = deadlines, checksums
        self.epoch = secrets.randbits(63)
        """Random number of this run of the server; leases of earlier runs are over."""
        self.address = ""
        """Address on which it listens, once it is started."""
        self.room = _Room(registered_bytes)
        self._listens, self._token = address, token
        self.token_bytes = token_bytes
        self._counting = threading.Lock()
        self._counts = Counter[str]()
        serve, seconds = lambda channel: _Puller(self, channel).live(), deadlines.handshake
        self._listener = Listener("pages", token, serve, most=MOST_CONNECTIONS, seconds=seconds)

    def start(self) -> str:
        """Begins to serve and returns the address; raises ConfigError as `listen` does."""
        self.address = self._listener.start(listen(self._listens, self._token))
        return self.address

    @property
    def counters(self) -> PagesLoad:
        """Work since the start, without leases. May be read from any thread."""
        with self._counting:
            return PagesLoad(**self._counts, registered_bytes=self.room.taken, timed_out={})

    def count(self, **more: int) -> None:
        """Adds to the counters of these names."""
        with self._counting:
            self._counts.update(more)

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections."""
        self._listener.close(seconds)


class _Room:
    """Budget of bytes, handed out first come, first served."""

    def __init__(self, most: int):
        self.taken = 0
        self._most = most
        self._changed = threading.Condition()

    def take(self, size: int, given_up: Callable[[], bool]) -> bool:
        """Waits until the bytes fit or nothing else is taken; False if `given_up` first."""
        with self._changed:
            while self.taken and self.taken + size > self._most:
                if given_up():
                    return False
                self._changed.wait(TICK_SECONDS)
            self.taken += size
            return True

    def give_back(self, size: int) -> None:
        """Gives the bytes back."""
        with self._changed:
            self.taken -= size
            self._changed.notify_all()


class _Puller(WorkingSession[frames.Fetch]):
    """One connected decode worker."""

    greeting = Join

    def __init__(self, server: PagesServer, channel: Channel):
        super().__init__("pages", channel, server.hello, server.deadlines)
        self._server = server

    def _admit(self, join: Join) -> frames.Welcome:
        return frames.Welcome(self._hello)

    def _fetch(self, fetch: frames.Fetch) -> None:
        self._server.count(queued=1)
        self._wanted.put(fetch)

    def _renew(self, renew: frames.Renew) -> None:
        self._server.holder.renew(renew.hand_offs)

    def _release(self, release: frames.Release) -> None:
        self._server.holder.release_hand_off(release.hand_off)

    handlers: ClassVar = {frames.Fetch: _fetch, frames.Renew: _renew, frames.Release: _release}

    def _work(self) -> None:
        """Serves fetches in order; reads each while the one before it is sent."""
        read: deque[_Reading] = deque()
        following: frames.Fetch | None = None
        ended = False
        while read or not ended:
            if following is None and not ended and len(read) <= READ_AHEAD:
                try:
                    following = self._wanted.get(block=not read)
                    ended = following is None
                except queue.Empty:
                    pass
            if following is not None and (begun := self._begin(following, wait=not read)):
                read.append(begun)
                following = None
                continue
            if read:
                self._finish(read.popleft())
            elif following is not None:  # given up
                self._server.count(queued=-1)
                following = None

    def _begin(self, fetch: frames.Fetch, *, wait: bool) -> "_Reading | None":
        """Starts to read a piece once there is room. Returns None if there is none and `wait` is
        not set, or the connection is given up."""
        server, reply = self._server, Future[Piece]()
        size = server.token_bytes * fetch.size
        if not server.room.take(size, lambda: not wait or self.failure is not None):
            return None
        if fetch.epoch != server.epoch:
            text = "the lease is of an earlier life of this prefill worker"
            reply.set_exception(PagesError(text))
        elif self.failure is not None:
            reply.set_exception(PagesError(self.failure))
        else:
            try:
                server.holder.export(fetch, reply)
            except Exception as error:  # reported like an error of the read; frees the room
                reply.set_exception(PagesError(f"{type(error).__name__}: {error}"))
        return _Reading(fetch, size, reply)

    def _finish(self, reading: "_Reading") -> None:
        """Sends a piece once it is read."""
        number, size = reading.fetch.number, reading.size
        try:
            piece = self._read_piece(reading)
            sent = send_arrays(
                self._channel,
                lambda bulk: encode(Ready(number, bulk)),
                on_host(piece),
                checked=self._server.checksums,
            )
            self._server.count(transfers=1, bytes=sent)
        except PagesError as error:
            self._server.count(failures=1)
            with contextlib.suppress(OSError):
                self.send(Failed(number, str(error), error.mismatch))
        except OSError as error:
            self.fail(f"the connection closed ({error})")
        except Exception as error:
            logger.exception("pages: fetch %d", number)
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            self._server.room.give_back(size)
            self._server.count(queued=-1)

    def _read_piece(self, reading: "_Reading") -> Piece:
        """Waits for the engine to read a piece; raises PagesError if it does not in time."""
        clock = AwakeClock(LONGEST_TICK_SECONDS)
        while True:
            try:
                return reading.reply.result(TICK_SECONDS)
            except TimeoutError:
                if self.failure is not None or clock.tick() > self._server.deadlines.answer:
                    raise PagesError("the engine did not answer") from None


class _Reading(NamedTuple):
    """A piece that the engine was asked to read."""

    fetch: frames.Fetch
    size: int
    """Size of the piece in bytes."""
    reply: Future[Piece]

"""One connection of a decode worker to a prefill worker's pages server.

A thread reads frames and pieces and gives the connection up when it is silent or late; the stream
that owns it (`client.py`) fetches, one range after the other, with some asked for ahead.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from jaxserve.link.bulk import CorruptBulk, HostBuffers, bulk_bytes, received_arrays
from jaxserve.link.pages import frames
from jaxserve.link.pages.frames import (
    CACHE_FORMAT,
    FetchedPiece,
    FetchJob,
    PagesError,
    pages_digest,
)
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import TICK_SECONDS, Deadlines, dial
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Hello, facts_digest
from jaxserve.link.session.messages import Bulk, Failed, Join, Ready
from jaxserve.link.session.session import Session

logger = logging.getLogger(__name__)

ASKED_AHEAD = 4
"""Most pieces asked for or not yet written. While one crosses, the prefill worker reads the next
one and the domain writes the one before."""


class Landing(Protocol):
    """Shapes and places in which pieces arrive; implemented by the owner of the pages."""

    @property
    def pieces(self) -> Sequence[int]:
        """Sizes of pieces in tokens, ascending."""

    @property
    def closes(self) -> bool:
        """True if the last piece must have the smallest size."""
        ...

    def landing(self, group: int, tokens: int, cache_format: str) -> Sequence[jax.ShapeDtypeStruct]:
        """Returns the shapes of a piece's arrays, with shardings."""


class _Asked(NamedTuple):
    """A piece that the prefill worker has been asked for."""

    fetch: frames.Fetch
    shapes: Sequence[jax.ShapeDtypeStruct]


class PagesConnection(Session):
    """Dials, proves the token and introduces this worker. The owner's thread fetches and closes;
    any thread may `fail` it.

    Args:
      on_tick: called several times a second with this connection, on the thread that reads.

    Raises: as `dial` and `greet`.
    """

    greeting = frames.Welcome

    def __init__(
        self,
        address: str,
        hello: Hello,
        token: str,
        *,
        buffers: HostBuffers,
        deadlines: Deadlines,
        on_tick: Callable[["PagesConnection"], None],
    ):
        join, seconds = Join(hello), deadlines.handshake
        channel = dial(address, token, seconds)
        welcome = greet(channel, join, frames.Welcome, self.decode, seconds)
        super().__init__(channel, deadlines)
        self.cache_format, _ = welcome.hello.formats[CACHE_FORMAT]
        self._model = facts_digest(welcome.hello.facts)
        self._buffers, self._on_tick = buffers, on_tick
        self._fetches = 0
        self._asked: deque[_Asked] = deque()
        """Pieces that the owner has asked for. Answers arrive in this order and remove them."""
        self._answers: queue.SimpleQueue[tuple[int, _Received | Failed] | None]
        self._answers = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._doubted = False
        self._reader = threading.Thread(target=self.read, name="pages reader", daemon=True)
        self._reader.start()

    def fetch(
        self, job: FetchJob, landing: Landing
    ) -> Iterator[tuple[frames.Fetch, int, FetchedPiece]]:
        """Asks for the rest of a job and yields its pieces as they arrive, in order, each with its
        range and its bytes. Ends early when the job is cancelled.

        Raises:
          PagesError: the other end does not hold the range, or cannot send it.
          CorruptBulk: the checksum of a piece is wrong; the piece was not given to the caller.
          OSError, RuntimeError: the connection was lost.
        """
        source, token_ids = job.source, job.token_ids
        digest = pages_digest(token_ids, self._model, self.cache_format)
        if digest != source.digest or len(token_ids) != source.tokens:
            raise PagesError(
                f"digest {source.digest} of {source.tokens} held tokens is not that of the "
                f"prompt's first {len(token_ids)}, {digest}",
                mismatch=True,
            )
        room = threading.Semaphore(ASKED_AHEAD)
        asked: deque[_Asked] = deque()
        waiting = deque(_ranges(job.start, job.stop, landing.pieces, closes=landing.closes))
        try:
            while (asked or waiting) and not job.cancelled:
                # Pieces that were not written yet hold up further ones, not those that are asked.
                while waiting and room.acquire(timeout=0 if asked else TICK_SECONDS):
                    wanted = waiting.popleft()
                    shapes = landing.landing(job.group, wanted.size, self.cache_format)
                    asked.append(self._ask(source, wanted, shapes))
                if self.failure is not None:
                    raise OSError(self.failure)
                if not asked:
                    self._busy_since = None
                    continue
                fetch, shapes = asked.popleft()
                buffer, bulk = self._answer(fetch.number)
                self._progress()
                try:
                    received = received_arrays(buffer, bulk, shapes)
                except CorruptBulk as error:
                    raise CorruptBulk(
                        f"tokens {fetch.start} to {fetch.stop} are corrupt: {error}"
                    ) from None
                arrays = jax.device_put(received, [shape.sharding for shape in shapes])
                piece = FetchedPiece(fetch.size, self.cache_format, arrays, room.release)
                yield fetch, len(buffer), piece
        finally:
            self._busy_since = None

    def close(self) -> None:
        """See `Session.end`; also waits for the thread. Called by the owner alone."""
        self.fail("closed here")
        self._reader.join()
        self._channel.close()

    def _ask(
        self, source: PagesSource, wanted: "_Range", shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> _Asked:
        lease = source.digest, source.epoch
        fetch = frames.Fetch(self._fetches, source.hand_off, *wanted, *lease)
        asked = _Asked(fetch, shapes)
        self._fetches += 1
        self._asked.append(asked)
        self._progress()
        self.send(fetch)
        return asked

    def _answer(self, number: int) -> "_Received":
        """Returns a piece; skips answers that no fetch waits for any more."""
        while (answer := self._answers.get()) is not None:
            given, content = answer
            if given != number:
                continue
            if isinstance(content, Failed):
                raise PagesError(content.text, mismatch=content.mismatch)
            return content
        raise OSError(self.failure)

    def _progress(self) -> None:
        self._busy_since = self._clock.now

    def _drop(self) -> None:
        self._answers.put(None)

    def _tick(self, now: float) -> None:
        super()._tick(now)
        waited = 0.0 if self._busy_since is None else now - self._busy_since
        if waited > self._deadlines.answer:
            self.fail(f"no pages within {self._deadlines.answer:g} s")
        self._doubt(self.silent, waited)
        if self.failure is None:
            self._on_tick(self)

    def _doubt(self, silent: float, waited: float) -> None:
        """Logs once that nothing arrives any more, or that echoes arrive and pages do not."""
        suspect = self._deadlines.suspect
        what = ""
        if silent > suspect:
            what = f"silent for {silent:.1f} s"
        elif waited > suspect:
            what = f"saturated: it answers, but pages have not come for {waited:.1f} s"
        if what and not self._doubted:
            logger.warning("pages link to %s is suspect: %s", self._channel.peer, what)
        self._doubted = bool(what)

    def _sent(self, ready: Ready) -> None:
        expected = bulk_bytes(self._next_asked(ready.number).shapes)
        if ready.bulk.size != expected:
            raise OSError(f"a piece of {ready.bulk.size} bytes, expected {expected}")
        buffer = self._buffers.take(expected)
        self._channel.receive_into(memoryview(buffer), self._deadlines.answer)
        self._answers.put((ready.number, (buffer, ready.bulk)))

    def _not_sent(self, failed: Failed) -> None:
        self._next_asked(failed.number)
        self._answers.put((failed.number, failed))

    handlers: ClassVar = {Ready: _sent, Failed: _not_sent}

    def _next_asked(self, number: int) -> _Asked:
        asked = self._asked.popleft() if self._asked else None
        if asked is None or asked.fetch.number != number:
            raise OSError(f"an answer to fetch {number}, expected {asked and asked.fetch.number}")
        return asked


_Received = tuple[np.ndarray, Bulk]
"""Bytes of a piece, and their announcement."""


class _Range(NamedTuple):
    """The token range that one fetch asks for."""

    start: int
    stop: int
    size: int
    """Tokens of the piece, padding included."""


def _ranges(start: int, stop: int, pieces: Sequence[int], *, closes: bool = False) -> list[_Range]:
    """Cuts a hand-off into pieces: the largest ones first, then those that cover the rest, with
    `closes` so that the last piece has the smallest size."""
    if closes and stop - start > pieces[0]:
        last = start + (stop - start - 1) // pieces[0] * pieces[0]
        return [*_ranges(start, last, pieces), _Range(last, stop, pieces[0])]
    ranges = []
    while start < stop:
        rest = stop - start
        largest = max((size for size in pieces if size <= rest), default=pieces[0])
        size = next((size for size in pieces if size >= rest), largest)
        # Uses several small pieces if an eighth or more of one large piece would be padding.
        if 8 * size > 9 * -(-rest // largest) * largest:
            size = largest
        ranges.append(_Range(start, min(stop, start + size), size))
        start += size
    return ranges

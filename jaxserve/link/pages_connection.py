"""One connection of a decode worker to a prefill worker's pages server.

A thread reads frames, keeps the other end alive and gives the connection up when it is silent or
late; the stream that owns it (`pages_client.py`) fetches, one range after the other, each asked for
while the one before it is pulled. Every way in which a connection ends passes through `fail`,
which turns what is being pulled into errors, so that nobody waits for it.
"""

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import msgspec

from jaxserve.clock import AwakeClock
from jaxserve.link.channel import Channel, Deadlines, cut_off, dial
from jaxserve.link.frames import Echo, Refused
from jaxserve.link.hello import Hello, refusal
from jaxserve.link.pages import PagesSource, pages_digest
from jaxserve.link.pages_frames import (
    Failed,
    Fetch,
    Join,
    Ready,
    Release,
    Renew,
    Taken,
    Welcome,
    decode_from_prefill,
    encode,
)
from jaxserve.link.peer import LONGEST_TICK_SECONDS, TICK_SECONDS, Refusal
from jaxserve.link.transfers import Transfers

ASKED_AHEAD = 4
"""Pieces that are asked for, and registered by the prefill worker, at a time: while one is pulled,
the prefill worker reads the next."""


class FetchError(Exception):
    """A fetch failed, and not because of its connection.

    Args:
      text: why.
      mismatch: whether what is held is something else than what is wanted.
    """

    def __init__(self, text: str, *, mismatch: bool = False):
        super().__init__(text)
        self.mismatch = mismatch


class Landing(Protocol):
    """Where pieces arrive; known to whoever holds the pages."""

    @property
    def pieces(self) -> Sequence[int]:
        """Tokens of a piece, ascending."""
        ...

    @property
    def imports(self) -> Sequence[str]:
        """Formats that can be taken."""
        ...

    def landing(self, group: int, tokens: int, cache_format: str) -> Sequence[jax.ShapeDtypeStruct]:
        """The arrays of a piece, with shardings."""
        ...


class Arrival(NamedTuple):
    """A piece that is there."""

    first: int
    tokens: int
    size: int
    """Tokens, padding included."""
    arrays: list[jax.Array]


class Connection:
    """From hello to loss. The owner's thread fetches and closes; any thread may `fail` it."""

    def __init__(
        self,
        channel: Channel,
        *,
        device: jax.Device,
        sockets: int,
        deadlines: Deadlines,
        on_tick: Callable[["Connection"], None],
    ):
        self.failure: str | None = None
        self.cache_format = ""
        self._channel = channel
        self._transfers = Transfers(device, channel.local_host, sockets)
        self._deadlines, self._on_tick = deadlines, on_tick
        self._failing = threading.Lock()
        self._model = ""
        self._fetches = 0
        self._answers: queue.SimpleQueue[Ready | Failed | None] = queue.SimpleQueue()
        self._clock = AwakeClock(LONGEST_TICK_SECONDS)
        self._busy_since: float | None = None
        self._reader = threading.Thread(target=self._read, name="pages reader", daemon=True)

    @classmethod
    def open(
        cls,
        address: str,
        hello: Hello,
        token: str,
        *,
        device: jax.Device,
        sockets: int,
        deadlines: Deadlines,
        on_tick: Callable[["Connection"], None],
    ) -> "Connection":
        """Dials, proves the token and introduces this worker.

        Raises:
          Refusal: the two ends do not fit.
          AuthenticationError: they have different tokens.
          OSError, EOFError, RuntimeError: nobody is there, or not in time.
        """
        channel = dial(address, deadlines.handshake)
        try:
            with cut_off(channel.shutdown, deadlines.handshake):
                channel.authenticate(token, accepted=False)
            connection = cls(
                channel, device=device, sockets=sockets, deadlines=deadlines, on_tick=on_tick
            )
            late = functools.partial(connection.fail, "the handshake took too long")
            with cut_off(late, deadlines.handshake):
                connection._join(hello)
        except BaseException:
            channel.close()
            raise
        connection._reader.start()
        return connection

    def _join(self, hello: Hello) -> None:
        self._channel.send(encode(Join(hello, self._transfers.address)))
        match decode_from_prefill(self._channel.receive()):
            case Welcome(hello=theirs, transfer_address=address, cache_format=cache_format):
                if reason := refusal(hello, theirs):
                    raise Refusal(reason)
            case Refused(reason=reason):
                raise Refusal(reason)
            case frame:
                raise Refusal(f"unexpected {type(frame).__name__} instead of a welcome")
        self._transfers.connect(address)
        self._model, self.cache_format = theirs.digest, cache_format

    def fetch(
        self,
        source: PagesSource,
        token_ids: Sequence[int],
        start: int,
        stop: int,
        group: int,
        landing: Landing,
        given_up: Callable[[], bool],
    ) -> Iterator[Arrival]:
        """Asks for a range of tokens and gives its pieces as they arrive, in order.

        Args:
          token_ids: all that the source says it holds.
          given_up: whether nothing more is to be asked for.

        Raises:
          FetchError: the other end does not have what is wanted, or cannot give it.
          OSError, RuntimeError: the connection was lost.
        """
        if self.cache_format not in landing.imports:
            raise Refusal(
                f"cache.format {self.cache_format} of {source.address} is none that is taken "
                f"here: {', '.join(landing.imports)}"
            )
        digest = pages_digest(token_ids, self._model, self.cache_format)
        if digest != source.digest or len(token_ids) != source.tokens:
            raise FetchError(
                f"digest {source.digest} of {source.tokens} held tokens is not that of the "
                f"prompt's first {len(token_ids)}, {digest}",
                mismatch=True,
            )
        asked: list[tuple[int, _Range]] = []
        waiting = iter(_ranges(start, stop, landing.pieces))
        for wanted in itertools.islice(waiting, ASKED_AHEAD):
            self._ask(source, wanted, asked)
        try:
            while asked:
                number, wanted = asked[0]
                ready = self._answer(number)
                pulled = [
                    self._transfers.pull(uuid, landing.landing(group, size, self.cache_format))
                    for uuid, size in zip(ready.uuids, wanted.pieces, strict=True)
                ]
                yield from self._arrivals(wanted, pulled)
                asked.pop(0)
                self._send(Taken(number))
                following = next(waiting, None) if not given_up() else None
                if following is not None:
                    self._ask(source, following, asked)
        finally:
            self._busy_since = None

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Says that leases are still wanted."""
        self._send(Renew(list(hand_offs)))

    def release(self, hand_off: str) -> None:
        """Says that a lease is not."""
        self._send(Release(hand_off))

    def fail(self, reason: str) -> None:
        """Gives the connection up; the first reason counts."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        self._transfers.cancel()
        self._channel.shutdown()
        self._answers.put(None)

    def close(self) -> None:
        """Ends it and frees the descriptors; by the owner alone."""
        self.fail("closed here")
        if self._reader.ident is not None:
            self._reader.join()
        self._channel.close()

    def _ask(self, source: PagesSource, wanted: "_Range", asked: list) -> None:
        number, self._fetches = self._fetches, self._fetches + 1
        asked.append((number, wanted))
        self._progress()
        self._send(
            Fetch(
                number,
                source.hand_off,
                wanted.start,
                wanted.stop,
                wanted.pieces,
                source.digest,
                source.epoch,
            )
        )

    def _answer(self, number: int) -> Ready:
        """The answer to a fetch, which come in order."""
        answer = self._answers.get()
        match answer:
            case Ready(number=given) if given == number:
                return answer
            case Failed(number=given, text=text, mismatch=mismatch) if given == number:
                raise FetchError(text, mismatch=mismatch)
            case None:
                raise OSError(self.failure)
        self.fail(f"an answer to fetch {answer.number}, expected {number}")
        raise OSError(self.failure)

    def _arrivals(self, wanted: "_Range", pulled: list[list[jax.Array]]) -> Iterator[Arrival]:
        first = wanted.start
        for size, arrays in zip(wanted.pieces, pulled, strict=True):
            for array in arrays:
                array.block_until_ready()  # `fail` turns it into an error
            self._progress()
            tokens = min(size, wanted.stop - first)
            yield Arrival(first, tokens, size, arrays)
            first += tokens

    def _progress(self) -> None:
        self._busy_since = self._clock.now

    def _send(self, frame: msgspec.Struct) -> None:
        try:
            self._channel.send(encode(frame))
        except OSError as error:
            self.fail(f"the connection closed ({error})")
            raise

    def _read(self) -> None:
        """Reads, sends echoes and watches deadlines until the connection has failed."""
        heard = echoed = self._clock.tick()
        deadlines = self._deadlines
        while self.failure is None:
            try:
                if self._channel.wait(TICK_SECONDS):
                    self._take(self._channel.receive())
                    heard = self._clock.now
                now = self._clock.tick()
                if now - heard > deadlines.down:
                    self.fail(f"silent for {now - heard:.1f} s")
                busy = self._busy_since
                if busy is not None and now - busy > deadlines.answer:
                    self.fail(f"no pages within {deadlines.answer:g} s")
                if now - echoed > deadlines.probe:
                    echoed = now
                    self._send(Echo(0))
                self._on_tick(self)
            except (EOFError, OSError) as error:
                self.fail(f"the connection closed ({error or 'end of file'})")
            except (RuntimeError, msgspec.DecodeError) as error:
                self.fail(str(error))

    def _take(self, data: bytes) -> None:
        match decode_from_prefill(data):
            case Echo():
                pass
            case Ready() | Failed() as answer:
                self._answers.put(answer)
            case frame:
                self.fail(f"unexpected {type(frame).__name__}")


class _Range(NamedTuple):
    """What one fetch asks for."""

    start: int
    stop: int
    pieces: list[int]


def _ranges(start: int, stop: int, pieces: Sequence[int]) -> list[_Range]:
    """The ranges of a hand-off, a piece each: the largest ones, then what covers the rest."""
    ranges = []
    while start < stop:
        rest = stop - start
        largest = max((size for size in pieces if size <= rest), default=pieces[0])
        size = next((size for size in pieces if size >= rest), largest)
        # Several small pieces where one large one would be padding by an eighth and more.
        if 8 * size > 9 * -(-rest // largest) * largest:
            size = largest
        ranges.append(_Range(start, min(stop, start + size), [size]))
        start += size
    return ranges

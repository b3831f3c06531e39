"""The decode worker's end of a pages link: fetches held pages from prefill workers.

The engine's thread hands fetches in, without waiting, and threads of this module hand their pieces
back. Each prefill worker has a few streams: threads with a connection of their own
(`connection.py`), kept from fetch to fetch. While a request waits for a slot, any stream renews its
lease. If a fetch loses its connection, or gets a piece with a wrong checksum, it continues once
over a new connection; after that it fails. A prefill worker that let a fetch time out is left alone
for a while (`Breaker`). `server.py` is the other end. Knows nothing of requests and pages.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.link.bulk import CorruptBulk, HostBuffers
from jaxserve.link.pages.connection import Landing, PagesConnection
from jaxserve.link.pages.frames import FetchJob, PagesError, Release, Renew
from jaxserve.link.pages.source import PagesLoad, PagesSource
from jaxserve.link.session.channel import DEFAULT_DEADLINES, AuthenticationError, Deadlines
from jaxserve.link.session.hello import Hello, Refusal

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""Idle time after which a stream closes its connection and ends."""
ATTEMPTS = 2
"""Connections over which a fetch is tried."""
OPEN_SECONDS = 10.0
"""Pause after a timeout, before a prefill worker is tried again."""


class Breaker:
    """Circuit breaker of one prefill worker: closed while it works, open after a timeout, half-open
    once the pause is over. Without it every request with pages at that worker would wait for the
    same deadline again.

    Args:
      clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = 0.0
        self.why = ""
        """Timeout that opened it; empty while it is closed."""

    def blocked(self) -> str:
        """Returns why the path must not be tried now, empty if the caller may try it.

        After each pause one caller may; all others wait for the end of another pause.
        """
        now = self._clock()
        if self.why and now < self._until:
            return (
                f"not tried for another {self._until - now:.0f} s, because it timed out: {self.why}"
            )
        self._until = now + OPEN_SECONDS
        return ""

    def timed_out(self, why: str) -> None:
        """Opens the breaker."""
        self.why, self._until = why, self._clock() + OPEN_SECONDS

    def worked(self) -> None:
        """Closes the breaker."""
        self.why = ""


class PagesClient:
    """Fetches pages from any number of prefill workers.

    Args:
      hello: this worker's facts; prefill workers with other facts are refused.
      token: the secret of the deployment.
      landing: where pieces are to arrive.
      lease_seconds: lease of the prefill workers, renewed every third of it.
      streams: concurrent fetches from one prefill worker, each with a connection.
      deadlines: deadlines of all waits.
    """

    def __init__(
        self,
        hello: Hello,
        token: str,
        *,
        landing: Landing,
        lease_seconds: float = 30.0,
        streams: int = 2,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ):
        self.lease_seconds, self.landing, self.deadlines = lease_seconds, landing, deadlines
        self.streams = streams
        self.hello, self.token, self.buffers = hello, token, HostBuffers()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._jobs: dict[Hashable, FetchJob] = {}
        self._counts = Counter[str]()
        self._wait_seconds = 0.0
        self._closed = False

    def keep(self, source: PagesSource) -> None:
        """Connects to the prefill worker and renews the lease until `release`."""
        with self._lock:
            if not self._closed:
                self._peer(source.address).keep(source.hand_off)

    def release(self, source: PagesSource) -> None:
        """Gives up the lease."""
        with self._lock:
            if not self._closed:
                self._peer(source.address).release(source.hand_off)

    def leave(self, source: PagesSource) -> None:
        """Leaves it to others to renew or release the lease."""
        with self._lock:
            peer = self._peers.get(source.address)
        if peer is not None:
            peer.leave(source.hand_off)

    def fetch(self, job: FetchJob) -> None:
        """Queues a fetch; its callbacks report the pieces or a failure."""
        with self._lock:
            self._jobs[job.key] = job
            blocked = "the pages link was closed"
            if not self._closed:
                peer = self._peer(job.source.address)
                if not (blocked := peer.breaker.blocked()):
                    peer.put(job)
        if blocked:
            self.ended(job, (blocked, False))

    def cancel(self, key: Hashable) -> None:
        """Drops a fetch; apart from a callback that is running, it makes no further ones."""
        with self._lock:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.cancelled = True

    @property
    def counters(self) -> PagesLoad:
        """Work since the client was opened. May be read from any thread."""
        with self._lock:
            return PagesLoad(
                **self._counts,
                queued=len(self._jobs),
                wait_seconds=self._wait_seconds,
                timed_out={
                    where: each.breaker.why
                    for where, each in self._peers.items()
                    if each.breaker.why
                },
            )

    def close(self, seconds: float = 5.0) -> None:
        """Ends all connections and threads; fetches under way fail."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        end = time.monotonic() + seconds
        for peer in peers:
            peer.join(max(0.0, end - time.monotonic()))

    def count(self, **more: int) -> None:
        """Adds to the counters of these names."""
        with self._lock:
            self._counts.update(more)

    def ended(self, job: FetchJob, failure: tuple[str, bool] | None) -> None:
        """Counts the end of a fetch and reports a failure."""
        with self._lock:
            wanted = self._jobs.pop(job.key, None) is job
            if wanted and failure is None:
                self._counts["transfers"] += 1
                self._wait_seconds += time.monotonic() - job.queued
            elif wanted:
                self._counts["failures"] += 1
        if wanted and failure is not None:
            logger.warning("pages of %s: %s", job.source.address, failure[0])
            job.on_failure(*failure)

    def _peer(self, address: str) -> "_Peer":
        peer = self._peers.get(address)
        if peer is None or not peer.alive:
            self._peers = {known: other for known, other in self._peers.items() if other.alive}
            peer = self._peers[address] = _Peer(self, address)
        return peer


class _Peer:
    """One prefill worker: its queue, its leases and its streams."""

    def __init__(self, client: PagesClient, address: str):
        self._client, self._address = client, address
        self.breaker = Breaker()
        self._changed = threading.Condition()
        self._queue: deque[FetchJob] = deque()
        self._kept: set[str] = set()
        self._released: dict[str, None] = {}  # in order, until sent
        self._streams: list[threading.Thread] = []
        self._connections: set[PagesConnection] = set()
        self._idle = 0
        self._renewed = time.monotonic()
        self._closing = False
        self._last = time.monotonic()

    @property
    def alive(self) -> bool:
        """True while it is in use; otherwise it can be dropped."""
        with self._changed:
            used = self._queue or self._kept or self._streams
            return bool(used) or time.monotonic() - self._last < IDLE_SECONDS

    def keep(self, hand_off: str) -> None:
        """Renews a lease from now on."""
        with self._changed:
            self._kept.add(hand_off)
            self._used()

    def release(self, hand_off: str) -> None:
        """Tells the prefill worker as soon as possible that a lease is over."""
        with self._changed:
            self._kept.discard(hand_off)
            self._released[hand_off] = None
            self._used()

    def leave(self, hand_off: str) -> None:
        """Stops renewing a lease."""
        with self._changed:
            self._kept.discard(hand_off)

    def put(self, job: FetchJob) -> None:
        """Queues a fetch."""
        with self._changed:
            self._queue.append(job)
            self._used()

    def close(self) -> None:
        """Closes all streams; fetches under way fail."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for connection in list(self._connections):
            connection.fail("closed here")

    def join(self, seconds: float) -> None:
        """Joins the streams' threads."""
        end = time.monotonic() + seconds
        for stream in list(self._streams):
            stream.join(max(0.0, end - time.monotonic()))

    def tick(self, connection: PagesConnection) -> None:
        """Sends due renewals and releases over a connection; on its reader's thread."""
        with self._changed:
            released = [*self._released]
            due = time.monotonic() - self._renewed > self._client.lease_seconds / 3
            kept = sorted(self._kept) if due else []
            if due:
                self._renewed = time.monotonic()
        for hand_off in released:
            connection.send(Release(hand_off))  # if this raises, the next connection sends it
            with self._changed:
                self._released.pop(hand_off, None)
        if kept:
            connection.send(Renew(kept))

    def _used(self) -> None:
        """Wakes a waiting stream, or starts one more, for a queued fetch."""
        self._last = time.monotonic()
        if not self._streams or (not self._idle and len(self._streams) < self._client.streams):
            thread = threading.Thread(
                target=self._stream, name=f"pages of {self._address}", daemon=True
            )
            self._streams.append(thread)
            thread.start()
        self._changed.notify()

    def _stream(self) -> None:
        """Serves fetches, one at a time, over one connection after the other."""
        connection: PagesConnection | None = None
        try:
            while self._wait():
                connection = self._live(connection)
        finally:
            self._drop(connection)
            with self._changed:
                self._streams.remove(threading.current_thread())

    def _wait(self) -> bool:
        """Waits until there is something to do; returns False at the end."""
        with self._changed:
            self._idle += 1
            try:
                while not self._closing:
                    connected = any(each.failure is None for each in self._connections)
                    if self._queue or ((self._kept or self._released) and not connected):
                        return True
                    if time.monotonic() - self._last > IDLE_SECONDS and not self._kept:
                        return False
                    self._changed.wait(1.0)
                return bool(self._queue)
            finally:
                self._idle -= 1

    def _live(self, connection: PagesConnection | None) -> PagesConnection | None:
        """Serves the next fetch, if any; returns the connection to use next."""
        with self._changed:
            job = self._queue.popleft() if self._queue else None
            self._last = began = time.monotonic()
        if job is not None and job.cancelled:
            return connection
        try:
            if self._closing:
                raise PagesError("the pages link was closed")
            if connection is None or connection.failure is not None:
                self._drop(connection)
                connection = None
                connection = PagesConnection(
                    self._address,
                    self._client.hello,
                    self._client.token,
                    buffers=self._client.buffers,
                    deadlines=self._client.deadlines,
                    on_tick=self.tick,
                )
                self._connections.add(connection)
            if job is not None:
                self._serve(connection, job)
                self.breaker.worked()
                self._client.ended(job, None)
        except (PagesError, Refusal, AuthenticationError, ConfigError) as error:
            self._failed(job, str(error), getattr(error, "mismatch", False))
        except (OSError, EOFError, RuntimeError, msgspec.DecodeError) as error:
            if isinstance(error, CorruptBulk):
                self._client.count(corrupt=1)
                logger.warning("pages of %s: %s", self._address, error)
            text = str(error) or type(error).__name__
            if connection is not None:
                connection.fail(text)
                text = connection.failure or text
            if time.monotonic() - began > self._client.deadlines.suspect:
                self.breaker.timed_out(text)
            self._lost(job, f"{self._address}: {text}", connection is not None)
        except Exception as error:  # A defect, which would go unnoticed if it ended this thread.
            logger.exception("pages of %s", self._address)
            self._failed(job, f"{type(error).__name__}: {error}", False)
        return connection

    def _serve(self, connection: PagesConnection, job: FetchJob) -> None:
        """Fetches the missing pieces of a job one by one."""
        job.attempts += 1
        for fetch, size, piece in connection.fetch(job, self._client.landing):
            job.start = fetch.stop
            self._client.count(bytes=size)
            if not job.cancelled:
                job.on_piece(fetch.start, fetch.stop - fetch.start, piece)

    def _lost(self, job: FetchJob | None, text: str, connected: bool) -> None:
        """Continues a fetch that lost its connection over another one, once."""
        if job is not None and connected and job.attempts < ATTEMPTS and not self._closing:
            with self._changed:
                self._queue.appendleft(job)
            return
        self._failed(job, text, False)

    def _failed(self, job: FetchJob | None, text: str, mismatch: bool) -> None:
        if job is not None:
            self._client.ended(job, (text, mismatch))
        else:  # Only connecting failed: later fetches will report it.
            with self._changed:
                self._kept.clear()
                self._released.clear()

    def _drop(self, connection: PagesConnection | None) -> None:
        if connection is not None:
            connection.close()
            self._connections.discard(connection)

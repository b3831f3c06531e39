"""The engine's side of KV hand-offs: holds prompts, and carries out the loop's page actions.

A prefill worker runs a prompt as an ordinary request for one token, which is discarded. When it
ends, `Holds` keeps its pages under a lease until the lease is released or runs out. The number of
held requests and pages is bounded; a prompt beyond the bounds waits there.

`LinkedHandOffs` works on the engine's thread, between steps: it reads pages into pieces and writes
pages from pieces that have arrived. It never waits for the network: a pages server asks from its
threads (`export`), a pages client tells on its own what has arrived, and both only post events to
the loop. A prefill worker has a server, a decode worker a client for each of its domains.
"""

import bisect
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jaxserve.engine.admission import FetchOrder
from jaxserve.engine.interface import FETCHED, PagesLoad, summed
from jaxserve.engine.loop import DropFetch, ExportPages, FetchPolicy, ImportPages, Loop
from jaxserve.engine.loop import Fetch as FetchAction
from jaxserve.engine.pages import pages_for
from jaxserve.engine.request import Request, TokenOutput, due
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.stepper import HandOffs, OnHeld, PageAction, Post
from jaxserve.errors import EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.link.pages.ends import ExportError, FetchJob, Piece
from jaxserve.link.pages.frames import Fetch, pages_digest
from jaxserve.link.pages.source import NOTHING_HELD, PagesSource
from jaxserve.roles.actions import ReadPages, WritePages
from jaxserve.roles.layout import PageRun

if TYPE_CHECKING:
    from jaxserve.link.pages.client import PagesClient
    from jaxserve.link.pages.server import PagesServer
    from jaxserve.roles.page_transfer import PageAccess

logger = logging.getLogger(__name__)


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what a prefill worker holds.

    Attributes:
      requests: Most prompts that run or are held at a time.
      pages: Most pages that those take together. A single prompt may take more.
      lease_seconds: Time after which pages are given back if no worker renews their lease.
      quadratic_tokens: Prompt length at which attention takes as long as the linear maps do.
      tokens_per_second: Rough speed of prefill. It turns tokens into the seconds by which a longer
        prompt is due later than a shorter one.
    """

    requests: int
    pages: int
    lease_seconds: float = 30.0
    quadratic_tokens: int = 32768
    tokens_per_second: float = 4096.0


@dataclass(eq=False)
class Hold:
    """One prompt whose pages are held.

    Attributes:
      request: The prompt.
      hand_off: Name of the lease.
      tokens: Tokens of the prompt, whose entries fill the pages.
      group: DP group of the pages.
      page_ids: Pages in the order of the tokens.
      until: Seconds of the clock at which the lease ends.
      digest: Digest that fetches must quote, see `pages_digest`.
    """

    request: Request
    hand_off: str
    tokens: int
    group: int
    page_ids: list[int]
    until: float
    digest: str = ""


class Holds:
    """All prompts that one scheduler runs and holds.

    Args:
      scheduler: Runs the prompts; it has a prefix cache.
      limits: Bounds of what is held.
      clock: Returns seconds.
      new_id: Draws the name of a lease, which must be hard to guess.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: HoldLimits,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ):
        self.limits = limits
        self.expired = 0
        """Leases that ran out, since the start."""
        self._scheduler, self._clock, self._new_id = scheduler, clock, new_id
        self._waiting: list[tuple[float, int, Request]] = []  # by when they are due
        self._running: dict[str, Request] = {}
        self._held: dict[str, Hold] = {}  # by request
        self._by_hand_off: dict[str, Hold] = {}
        self._seen = 0

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for room."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Number of prompts whose pages are held."""
        return len(self._held)

    def of_request(self, request_id: str) -> Hold | None:
        """Returns the hold of a request."""
        return self._held.get(request_id)

    def of_hand_off(self, hand_off: str) -> Hold | None:
        """Returns the hold of a lease."""
        return self._by_hand_off.get(hand_off)

    def add(self, request: Request) -> None:
        """Takes in a prompt of whole pages, which runs when room is left for it.

        Raises:
          InvalidRequestError: The prompt could never run, or its id is in use.
          OverloadedError: Too many prompts wait.
        """
        self._scheduler.limits.check(request)
        known = request.request_id in self._running or request.request_id in self._held
        if known or any(request.request_id == other.request_id for *_, other in self._waiting):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
        waiting = self.waiting + self._scheduler.num_waiting
        if waiting >= self._scheduler.max_waiting:
            raise OverloadedError(f"{waiting} prompts wait already")
        self._seen += 1
        bisect.insort(self._waiting, (self._due(request), self._seen, request), key=_rank)
        self.admit()

    def admit(self) -> None:
        """Starts waiting prompts, in order, while the pages of the first one find room.

        A prompt that the scheduler refuses for its full queue stays the first of those that wait.
        """
        while self._waiting and self._room(self._waiting[0][-1]):
            when, _, request = self._waiting[0]
            try:
                self._scheduler.add(request, due_at=when)
            except OverloadedError:
                return
            self._running[request.request_id] = request
            del self._waiting[0]

    def ended(self, request_id: str) -> None:
        """Begins the lease of a prompt that has ended, if the scheduler holds its pages.

        Pages that do not cover the prompt are given back: a fetch of the rest would read pages of
        other requests.
        """
        request = self._running.pop(request_id, None)
        held = self._scheduler.held(request_id)
        if request is not None and held is not None:
            group, page_ids = held
            tokens, until = len(request.prompt), self._clock() + self.limits.lease_seconds
            covered = pages_for(tokens, self._scheduler.page_size) * self._scheduler.tables
            if len(page_ids) == covered:
                hold = Hold(request, self._new_id(), tokens, group, page_ids, until)
                self._held[request_id] = self._by_hand_off[hold.hand_off] = hold
            else:
                logger.error(
                    "request %r: %d pages for %d tokens are not held",
                    *(request_id, len(page_ids), tokens),
                )
                self._scheduler.let_go(request_id)
        self.admit()

    def cancel(self, request_id: str) -> bool:
        """Forgets a waiting prompt, or gives the pages of a held one back. The caller cancels a
        running one with the scheduler. Returns whether the prompt waited."""
        if request_id in self._held:
            self._let_go(self._held[request_id])
            return False
        before = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry[-1].request_id != request_id]
        return len(self._waiting) < before

    def renew(self, hand_off: str) -> bool:
        """Begins a lease anew; returns False if it is unknown."""
        hold = self._by_hand_off.get(hand_off)
        if hold is None:
            return False
        hold.until = self._clock() + self.limits.lease_seconds
        return True

    def release(self, hand_off: str) -> None:
        """Gives the pages of a lease back. An unknown lease is ignored."""
        if hold := self._by_hand_off.get(hand_off):
            self._let_go(hold)

    def run(self, hand_off: str, start: int, stop: int) -> PageRun:
        """Returns the pages with the entries of tokens `start` to `stop` of a lease.

        Raises:
          KeyError: The lease is unknown, or is over.
          ValueError: The lease does not hold these tokens.
        """
        hold = self._by_hand_off[hand_off]
        if not 0 <= start < stop <= hold.tokens:
            raise ValueError(f"tokens {start} to {stop} wanted, {hold.tokens} are held")
        size = self._scheduler.page_size
        tables = self._scheduler.tables
        pages = hold.page_ids[start // size * tables : pages_for(stop, size) * tables]
        return PageRun(hold.group, pages, start % size)

    def tick(self) -> None:
        """Releases the holds whose lease has expired."""
        now = self._clock()
        for hold in [hold for hold in self._held.values() if hold.until <= now]:
            self.expired += 1
            self._let_go(hold)

    @property
    def next_deadline(self) -> float | None:
        """Seconds of the clock at which the next lease ends; None without leases."""
        return min((hold.until for hold in self._held.values()), default=None)

    def _let_go(self, hold: Hold) -> None:
        del self._held[hold.request.request_id], self._by_hand_off[hold.hand_off]
        self._scheduler.let_go(hold.request.request_id)
        self.admit()

    def _room(self, request: Request) -> bool:
        if len(self._running) + len(self._held) >= self.limits.requests:
            return False
        size = self._scheduler.page_size
        running = sum(pages_for(len(other.prompt), size) for other in self._running.values())
        taken = running + sum(pages_for(hold.tokens, size) for hold in self._held.values())
        return not taken or taken + pages_for(len(request.prompt), size) <= self.limits.pages

    def _due(self, request: Request) -> float:
        """Returns when a prompt should be done. A shorter one is due sooner, and need not wait
        behind a long one. Only what arrives while a prompt would run can overtake it."""
        tokens = len(request.prompt) - self._scheduler.cached_tokens(request)
        length = len(request.prompt)
        before = length - tokens
        quadratic = (length * length - before * before) / self.limits.quadratic_tokens
        return due(request) + (tokens + quadratic) / self.limits.tokens_per_second


def _rank(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]


logger = logging.getLogger(__name__)


class PrefillEnd(NamedTuple):
    """The parts with which an engine prefills for other workers."""

    server: "PagesServer"
    access: "PageAccess"
    limits: HoldLimits


class DecodeEnd(NamedTuple):
    """The parts with which one domain fetches pages."""

    client: "PagesClient"
    access: "PageAccess"


class Export(NamedTuple):
    """A fetch that the pages server has received, and its answer."""

    fetch: Fetch
    reply: "Future[Piece]"


class LinkedHandOffs(HandOffs):
    """Hand-offs of an engine with a pages server or pages clients.

    Args:
      loop: The engine's loop, used on the engine's thread alone.
      post: See `Post`.
    """

    def __init__(self, loop: Loop, post: Post):
        self._loop, self._post = loop, post
        self.prefill: PrefillEnd | None = None
        """None: this engine holds no prompts."""
        self.domains: Sequence[DecodeEnd] = ()
        """One a domain; empty: this engine fetches no pages."""
        self._sources: dict[str, tuple[PagesClient, PagesSource]] = {}  # of open requests
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ set-up, before the start
    def serve(self, end: PrefillEnd) -> None:
        """Makes this a prefill worker's engine. The caller starts the server."""
        self.prefill = end
        self._loop.holds = Holds(
            self._loop.schedulers[0], end.limits, time.monotonic, lambda: secrets.token_hex(8)
        )

    def fetch_with(self, domains: Sequence[DecodeEnd], policy: FetchPolicy) -> None:
        """Lets the domains fetch pages of prefill workers."""
        self.domains, self._loop.fetch_policy = domains, policy

    @property
    def held(self) -> int:
        """Prompts whose pages are held."""
        return self._loop.holds.held if self._loop.holds is not None else 0

    @property
    def load(self) -> PagesLoad | None:
        """Counters of this engine's ends of the link; from any thread."""
        if self.prefill is not None and self._loop.holds is not None:
            exported = self.prefill.server.counters
            given = ("transfers", "bytes", "failures", "queued", "registered_bytes")
            return PagesLoad(**summed([exported], given), expired=self._loop.holds.expired)
        if not self.domains:
            return None
        fetched = [end.client.counters for end in self.domains]
        return PagesLoad(
            **summed(fetched, FETCHED),
            timed_out={address: why for each in fetched for address, why in each.timed_out.items()},
        )

    # ---------------------------------------------------------------- requests, from any thread
    def keep(self, request: Request) -> None:
        """Keeps the lease of a submitted request's source until the request's first output.

        The request's domain is not decided yet. A lease belongs to the prefill worker and knows no
        domain, so the first domain's client renews and releases the leases of all domains.
        """
        source = request.source
        if source is None or not source.tokens or not self.domains:
            return super().keep(request)
        tokens = len(request.prompt) + len(request.emitted)
        if source.tokens > tokens:
            raise InvalidRequestError(
                "source", f"{source.tokens} tokens are held of a request of {tokens}"
            )
        client = self.domains[0].client
        with self._lock:
            self._sources[request.request_id] = client, source
        client.keep(source)

    def forget(self, request_id: str) -> None:
        """Releases the lease of a request that has its first output, or has ended."""
        if self._sources and (kept := self._pop_source(request_id)) is not None:
            kept[0].release(kept[1])

    def leave(self, request_id: str) -> None:
        """Stops renewing the lease of a request that another engine takes over."""
        if (kept := self._pop_source(request_id)) is not None:
            kept[0].leave(kept[1])

    def _pop_source(self, request_id: str) -> "tuple[PagesClient, PagesSource] | None":
        with self._lock:
            return self._sources.pop(request_id, None)

    def told(self, request: Request, on_held: OnHeld) -> Callable[[TokenOutput], None]:
        """See `HandOffs`."""
        if self.prefill is None:
            return super().told(request, on_held)

        def on_output(output: TokenOutput) -> None:
            if output.finish_reason is None:
                return
            assert self._loop.holds is not None
            hold = self._loop.holds.of_request(request.request_id)
            if output.finish_reason == "length" and hold is not None:
                on_held(self._source(hold, output.cached_tokens))
            elif output.finish_reason == "length" and not request.prompt:
                on_held(NOTHING_HELD)
            else:
                text = output.error or "the prefill was cancelled, or its deadline passed"
                on_held(EngineFailedError(text))

        return on_output

    def _source(self, hold: Hold, cached: int) -> PagesSource:
        assert self.prefill is not None
        server = self.prefill.server
        hold.digest = pages_digest(hold.request.prompt, server.hello.digest, server.cache_format)
        return PagesSource(
            *(server.address, hold.hand_off, hold.tokens, hold.digest, server.epoch, cached)
        )

    # -------------------------------------------------- what the server asks for, on its threads
    def export(self, fetch: Fetch, reply: "Future[Piece]") -> None:
        """Has a range of held pages read (`pages_server.Holder`)."""

        def ask() -> list[TokenOutput]:
            try:
                assert self._loop.holds is not None
                hold = self._loop.holds.of_hand_off(fetch.hand_off)
                if hold is None:
                    raise ExportError("the lease is unknown here, or is over")
                if hold.digest != fetch.digest:
                    raise ExportError(
                        f"digest {fetch.digest} was asked for, {hold.digest} is held", mismatch=True
                    )
                job = Export(fetch, reply)
                self._loop.export(fetch.hand_off, fetch.start, fetch.stop, job)
            except (ExportError, ValueError) as error:
                mismatch = getattr(error, "mismatch", True)
                reply.set_exception(ExportError(str(error), mismatch=mismatch))
            return []

        self._post(ask)

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins leases anew (`pages_server.Holder`)."""

        def renew() -> list[TokenOutput]:
            if (holds := self._loop.holds) is not None:
                for hand_off in hand_offs:
                    holds.renew(hand_off)
            return []

        self._post(renew)

    def release_hand_off(self, hand_off: str) -> None:
        """Ends a lease (`pages_server.Holder`)."""

        def release() -> list[TokenOutput]:
            assert self._loop.holds is not None
            self._loop.holds.release(hand_off)
            return []

        self._post(release)

    # ----------------------------------------------------- the loop's actions, engine's thread
    def orders(self, action: PageAction) -> list[ReadPages | WritePages]:
        """Returns the part of other processes in an action, before this one carries it out."""
        match action:
            case ImportPages(domain, _, run, _, piece) if self._spread(domain):
                ids = [*run.page_ids]
                form = piece.cache_format
                return [WritePages(domain, run.group, ids, run.offset, piece.tokens, form)]
            case ExportPages(run, _, _, Export(fetch, _)) if self._spread(0):
                return [ReadPages(0, run.group, [*run.page_ids], run.offset, fetch.size)]
        return []

    def _spread(self, domain: int) -> bool:
        end = self.prefill or self.domains[domain]
        return end.access.transfer.spread

    def carry_out(self, action: PageAction) -> None:
        """Carries out an action of the loop about pages; never waits."""
        match action:
            case FetchAction(domain, order):
                self._fetch(domain, order)
            case DropFetch(domain, ticket):
                self.domains[domain].client.cancel((domain, ticket))
            case ImportPages(domain, ticket, run, tokens, piece):
                access = self.domains[domain].access
                access.write(run, piece.tokens, piece.cache_format, piece.arrays)
                piece.done()
                self._loop.imported(domain, ticket, tokens)
            case ExportPages(run, _, tokens, Export(fetch, reply)):
                assert self.prefill is not None
                try:
                    reply.set_result(self.prefill.access.read(run, tokens, fetch.size))
                except ValueError as error:
                    reply.set_exception(ExportError(str(error), mismatch=True))

    def close(self) -> None:
        """Ends the links."""
        if self.prefill is not None:
            self.prefill.server.close()
        for end in self.domains:
            end.client.close()

    def _fetch(self, domain: int, order: FetchOrder) -> None:
        loop, ticket = self._loop, order.ticket

        def arrived(first: int, tokens: int, piece: object) -> None:
            def tell() -> list[TokenOutput]:
                loop.arrived(domain, ticket, first, tokens, piece)
                return []

            self._post(tell)

        def failed(text: str, mismatch: bool) -> None:
            self._post(lambda: loop.fetch_failed(domain, ticket, text, mismatch=mismatch))

        source = order.source
        job = FetchJob(
            (domain, ticket),
            source,
            order.token_ids,
            order.start,
            order.stop,
            order.group,
            on_piece=arrived,
            on_failure=failed,
        )
        self.domains[domain].client.fetch(job)

"""The engine's ends of KV hand-offs: carries out the loop's actions about pages.

`LinkedHandOffs` works on the engine's thread, between steps: it reads pages into pieces and writes
pages from pieces that have arrived. It never waits for the network: the threads of a pages server
(`export`) and of a pages client, which receives pieces, only post events to the loop. A prefill
worker has a server, a decode worker a client for each of its domains.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jaxserve.engine.admission import FetchOrder
from jaxserve.engine.loop import (
    DropFetch,
    ExportPages,
    FetchPages,
    FetchPolicy,
    ImportPages,
    Loop,
    PageAction,
)
from jaxserve.engine.request import Request, TokenOutput
from jaxserve.engine.stepper import HandOffs, OnHeld, Post
from jaxserve.errors import EngineFailedError, InvalidRequestError
from jaxserve.link.pages.frames import Fetch, FetchJob, PagesError, Piece, pages_digest
from jaxserve.link.pages.source import NOTHING_HELD, PagesLoad, PagesSource
from jaxserve.observe.load import FETCHED, summed

if TYPE_CHECKING:
    from jaxserve.engine.holds import Hold, Holds
    from jaxserve.link.pages.client import PagesClient
    from jaxserve.link.pages.server import PagesServer
    from jaxserve.roles.page_transfer import PageAccess


class PrefillEnd(NamedTuple):
    """The parts with which an engine prefills for other workers."""

    server: "PagesServer"
    access: "PageAccess"
    holds: "Holds"


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
        self.prefill, self._loop.holds = end, end.holds

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
            expired = self._loop.holds.expired
            return msgspec.structs.replace(self.prefill.server.counters, expired=expired)
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
                on_held(self._source(hold, output))
            elif output.finish_reason == "length" and not request.prompt:
                on_held(NOTHING_HELD)
            else:
                text = output.error or "the prefill was cancelled, or its deadline passed"
                on_held(EngineFailedError(text))

        return on_output

    def _source(self, hold: "Hold", last: TokenOutput) -> PagesSource:
        assert self.prefill is not None
        server = self.prefill.server
        hold.digest = pages_digest(hold.request.prompt, server.model, server.cache_format)
        return PagesSource(
            *(server.address, hold.hand_off, hold.tokens, hold.digest, server.epoch),
            *(last.cached_tokens, last.queue_seconds),
        )

    # -------------------------------------------------- what the server asks for, on its threads
    def export(self, fetch: Fetch, reply: "Future[Piece]") -> None:
        """Has a range of held pages read (`pages_server.Holder`)."""

        def ask() -> None:
            try:
                assert self._loop.holds is not None
                hold = self._loop.holds.of_hand_off(fetch.hand_off)
                if hold is None:
                    raise PagesError("the lease is unknown here, or is over")
                if hold.digest != fetch.digest:
                    raise PagesError(
                        f"digest {fetch.digest} was asked for, {hold.digest} is held", mismatch=True
                    )
                job = Export(fetch, reply)
                self._loop.export(fetch.hand_off, fetch.start, fetch.stop, job)
            except (PagesError, ValueError) as error:
                mismatch = getattr(error, "mismatch", True)
                reply.set_exception(PagesError(str(error), mismatch=mismatch))

        self._post(ask)

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins leases anew (`pages_server.Holder`)."""

        def renew() -> None:
            if (holds := self._loop.holds) is not None:
                for hand_off in hand_offs:
                    holds.renew(hand_off)

        self._post(renew)

    def release_hand_off(self, hand_off: str) -> None:
        """Ends a lease (`pages_server.Holder`)."""
        assert self._loop.holds is not None
        self._post(partial(self._loop.holds.release, hand_off))

    # ----------------------------------------------------- the loop's actions, engine's thread
    def carry_out(self, action: PageAction) -> None:
        """Carries out an action of the loop about pages; never waits."""
        match action:
            case FetchPages(domain, order):
                self._fetch(domain, order)
            case DropFetch(domain, ticket):
                self.domains[domain].client.cancel((domain, ticket))
            case ImportPages(domain, ticket, run, tokens, piece):
                access = self.domains[domain].access
                access.write(run, piece.tokens, piece.cache_format, piece.arrays)
                piece.done()
                self._loop.imported(domain, ticket, tokens)
            case ExportPages(run, tokens, Export(fetch, reply)):
                assert self.prefill is not None
                try:
                    reply.set_result(self.prefill.access.read(run, tokens, fetch.size))
                except ValueError as error:
                    reply.set_exception(PagesError(str(error), mismatch=True))

    def close(self) -> None:
        """Ends the links."""
        if self.prefill is not None:
            self.prefill.server.close()
        for end in self.domains:
            end.client.close()

    def _fetch(self, domain: int, order: FetchOrder) -> None:
        loop, ticket = self._loop, order.ticket

        def arrived(first: int, tokens: int, piece: object) -> None:
            self._post(partial(loop.arrived, domain, ticket, first, tokens, piece))

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

"""The interface through which an engine hands KV pages over, and its empty form.

An engine gets its ends of links to prefill workers or decode domains before it is started
(`Engine.hand_off_with`); they are `hand_off.LinkedHandOffs`, whose code others do not need.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxserve.engine.load import PagesLoad
from jaxserve.engine.loop import DropFetch, ExportPages, Fetch, ImportPages
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.errors import InvalidRequestError, JaxserveError
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.actions import ReadPages, WritePages

Post = Callable[[Callable[[], Iterable[TokenOutput]]], None]
"""Runs a callable on the engine's thread, which delivers the outputs that it returns."""

OnHeld = Callable[[PagesSource | JaxserveError], None]
"""Called once with the place where a prompt's pages are held, or with the error."""

PageAction = Fetch | DropFetch | ImportPages | ExportPages
"""An action of the loop about pages."""

PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class HandOffs:
    """Hand-offs of an engine that holds no prompts and fetches no pages."""

    @property
    def held(self) -> int:
        """Prompts whose pages are held."""
        return 0

    @property
    def load(self) -> PagesLoad | None:
        """Counters of this engine's ends of the link, from any thread; None without a link."""
        return None

    # ---------------------------------------------------------------- requests, from any thread
    def keep(self, request: Request) -> None:
        """Keeps the lease of a submitted request's source until the request's first output.

        Raises:
          InvalidRequestError: The request has a source, and this engine cannot fetch from it.
        """
        if request.source is not None and request.source.tokens:
            raise InvalidRequestError("source", "this engine has no link to prefill workers")

    def forget(self, request_id: str) -> None:
        """Releases the lease of a request that has its first output, or has ended."""

    def leave(self, request_id: str) -> None:
        """Stops renewing the lease of a request that another engine takes over."""

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins leases anew. Unknown leases are ignored."""

    def told(self, request: Request, on_held: OnHeld) -> Callable[[TokenOutput], None]:
        """Returns the receiver of a prompt's outputs, which calls `on_held` at the last one.

        Raises:
          InvalidRequestError: This engine has no pages server.
        """
        raise InvalidRequestError("prefill", "this engine has no pages server")

    # ----------------------------------------------------- the loop's actions, engine's thread
    def orders(self, action: PageAction) -> list[ReadPages | WritePages]:
        """Returns the part of other processes in an action, before this one carries it out."""
        return []

    def carry_out(self, action: PageAction) -> None:
        """Carries out an action of the loop about pages; never waits."""
        raise AssertionError(f"no link for {type(action).__name__}")

    def close(self) -> None:
        """Ends the links."""

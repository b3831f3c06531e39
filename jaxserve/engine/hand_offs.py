"""KV hand-offs as an engine knows them, and an engine that has none.

An engine gets its ends of links to prefill workers or decode domains before it is started
(`Engine.hand_off_with`); they are `hand_off.LinkedHandOffs`, whose code others do not need.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxserve.engine.load import PagesLoad
from jaxserve.engine.loop import DropFetch, ExportPages, Fetch, ImportPages
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.errors import InvalidRequestError, JaxserveError
from jaxserve.link.pages import PagesSource
from jaxserve.roles.actions import ReadPages, WritePages

Post = Callable[[Callable[[], Iterable[TokenOutput]]], None]
"""Runs a callable on the engine's thread, which delivers the outputs that it returns."""

OnHeld = Callable[[PagesSource | JaxserveError], None]
"""Takes where the pages of a prompt are held, or why they are not; called once."""

PageAction = Fetch | DropFetch | ImportPages | ExportPages
"""What the loop decides about pages."""

PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class HandOffs:
    """Of an engine that holds no prompts for others and fetches no pages."""

    @property
    def held(self) -> int:
        """Prompts whose pages are held."""
        return 0

    @property
    def load(self) -> PagesLoad | None:
        """What this engine's ends of the link have done, from any thread; None: it has none."""
        return None

    # ---------------------------------------------------------------- requests, from any thread
    def keep(self, request: Request) -> None:
        """A request was submitted: the lease of its source is kept until its first output.

        Raises:
          InvalidRequestError: it has a source, and nothing can be fetched from there.
        """
        if request.source is not None and request.source.tokens:
            raise InvalidRequestError("source", "this engine has no link to prefill workers")

    def forget(self, request_id: str) -> None:
        """The request has its first output, or its end: what is held for it is not wanted."""

    def leave(self, request_id: str) -> None:
        """The request goes elsewhere: what is held for it stays held, and others renew it."""

    def renew(self, hand_offs: Sequence[str]) -> None:
        """Begins leases anew; unknown ones are fine."""

    def told(self, request: Request, on_held: OnHeld) -> Callable[[TokenOutput], None]:
        """What becomes of a prompt's outputs: its last one says whether it is held.

        Raises:
          InvalidRequestError: this engine has no pages server.
        """
        raise InvalidRequestError("prefill", "this engine has no pages server")

    # ----------------------------------------------------- the loop's actions, engine's thread
    def orders(self, action: PageAction) -> list[ReadPages | WritePages]:
        """What other processes have to do with an action, before this one carries it out."""
        return []

    def carry_out(self, action: PageAction) -> None:
        """Carries out an action of the loop about pages; never waits."""
        raise AssertionError(f"no link for {type(action).__name__}")

    def close(self) -> None:
        """Ends the links."""

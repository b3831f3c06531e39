"""What the coordinator of a router decides; `router.py` carries it out."""

from typing import NamedTuple

from jaxserve.engine.request import FinishReason
from jaxserve.fleet.routed import Routed


class SendPrefill(NamedTuple):
    """A prompt for a prefill worker."""

    worker: str
    attempt: str
    request: Routed
    priority: int


class SendSubmit(NamedTuple):
    """A request for a domain; with the source of its pages, if they are held."""

    worker: str
    attempt: str
    request: Routed


class SendAdopt(NamedTuple):
    """A request that a domain has kept when its router was lost."""

    worker: str
    attempt: str
    request: Routed


class SendRelease(NamedTuple):
    """Held pages, or a prompt, that are not needed any more."""

    worker: str
    attempt: str


class SendRenew(NamedTuple):
    """Held pages that still are."""

    worker: str
    hand_off: str


class SendCancel(NamedTuple):
    """A request that a domain is to drop."""

    worker: str
    attempt: str


class SendWithdraw(NamedTuple):
    """A request that a domain may give back, if it waits there: another one has a free slot."""

    worker: str
    attempt: str


class End(NamedTuple):
    """A request that ends without a worker's last output."""

    request: Routed
    reason: FinishReason
    error: str | None = None
    unavailable: bool = False
    """Whether it might succeed later."""


Send = SendPrefill | SendSubmit | SendAdopt | SendRelease | SendRenew | SendCancel | SendWithdraw
Action = Send | End

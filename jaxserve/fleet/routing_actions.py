"""Actions that a router's coordinator decides and `router.py` carries out."""

from typing import NamedTuple

from jaxserve.engine.request import FinishReason
from jaxserve.fleet.routed import Routed


class SendPrefill(NamedTuple):
    """Sends a prompt to a prefill worker."""

    worker: str
    attempt: str
    request: Routed
    priority: int


class SendSubmit(NamedTuple):
    """Sends a request to a domain, with the source of its pages if they are held."""

    worker: str
    attempt: str
    request: Routed


class SendAdopt(NamedTuple):
    """Takes over a request that a domain kept when its router was lost."""

    worker: str
    attempt: str
    request: Routed


class SendRelease(NamedTuple):
    """Gives up held pages, or a prompt, that are no longer needed."""

    worker: str
    attempt: str


class SendRenew(NamedTuple):
    """Renews the lease of held pages that are still needed."""

    worker: str
    hand_off: str


class SendCancel(NamedTuple):
    """Tells a domain to drop a request."""

    worker: str
    attempt: str


class SendWithdraw(NamedTuple):
    """Lets a domain give back a request that still waits there: another has a free slot."""

    worker: str
    attempt: str


class End(NamedTuple):
    """Ends a request without a last output from a worker."""

    request: Routed
    reason: FinishReason
    error: str | None = None
    unavailable: bool = False
    """True if the request might succeed later."""


Send = SendPrefill | SendSubmit | SendAdopt | SendRelease | SendRenew | SendCancel | SendWithdraw
Action = Send | End

"""Actions that a router's coordinator decides and `router.py` carries out."""

from typing import NamedTuple

from jaxserve.engine.request import FinishReason
from jaxserve.fleet.request_frames import Cancel
from jaxserve.fleet.routed import Routed
from jaxserve.fleet.worker_frames import Adopt, Release, Renew, Withdraw


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


class SendFrame(NamedTuple):
    """Sends a worker a message that says everything."""

    worker: str
    frame: Adopt | Cancel | Release | Renew | Withdraw


class End(NamedTuple):
    """Ends a request without a last output from a worker."""

    request: Routed
    reason: FinishReason
    error: str | None = None
    unavailable: bool = False
    """True if the request might succeed later."""


Send = SendPrefill | SendSubmit | SendFrame
Action = Send | End

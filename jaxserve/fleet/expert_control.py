"""Questions of attention runtimes about the experts of an ffn runtime of its own, and the answer.

`remote_experts.py` asks, `expert_answers.py` answers.
"""

import msgspec

from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.worker import Proposal


class Look(msgspec.Struct, frozen=True, tag=True):
    """Asks where experts are; with `watch` also for the latest passes, measured from now on."""

    watch: bool = False


class RebalanceExperts(msgspec.Struct, frozen=True, tag=True):
    """Asks for a rebalance (`ExpertBalancer.rebalance`)."""

    dry_run: bool


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Asks a worker that began anew to move its experts there."""

    placements: dict[int, tuple[int, ...]]


class Findings(msgspec.Struct, frozen=True):
    """The answer to every question."""

    worker: str
    """Name of the worker, different after every start."""
    view: ExpertView = ExpertView()
    placements: dict[int, tuple[int, ...]] = {}
    work: FFNWorkerView = FFNWorkerView()
    """Work since the start."""
    spans: list[Span] = []
    """The latest passes, if they are measured; their lanes are not known here."""
    proposal: Proposal | None = None
    refused: str = ""
    """Why nothing was done: moves are under way, the placement does not fit, no experts."""
    failed: str = ""
    """Error of the ffn worker."""


encode = msgspec.msgpack.Encoder().encode
questions = msgspec.msgpack.Decoder(Look | RebalanceExperts | Restore)
answers = msgspec.msgpack.Decoder(Findings)

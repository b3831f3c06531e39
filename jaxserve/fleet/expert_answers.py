"""Answers questions of attention runtimes about the experts of an ffn runtime."""

import math
import secrets
import time

from jaxserve.errors import EngineFailedError
from jaxserve.fleet.expert_control import Found, Look, Place, Rebalance, encode, questions
from jaxserve.model.ffn.placement import check_placement
from jaxserve.observe.recorder import Recorder, StageResult
from jaxserve.observe.spans import Span
from jaxserve.roles.expert_balancer import ExpertBalancer

MOST_SPANS = 2048
"""Most passes that are kept."""
WATCH_SECONDS = 30.0
"""How long passes are measured after an attention runtime asked for them."""


def answer(balancer: ExpertBalancer, log: "PassLog", question: bytes) -> bytes:
    """Returns the ffn runtime's answer to a question. Called from any thread but the one that
    carries actions out.

    Raises:
      msgspec.DecodeError: the bytes are no question.
    """
    asked, proposal, refused, failed = questions.decode(question), None, "", ""
    spans: list[Span] = []
    try:
        match asked:
            case Rebalance(dry_run):
                proposal = balancer.rebalance(dry_run=dry_run)
            case Place(placements):
                _place(balancer, placements)
            case Look(watch):
                spans = log.spans() if watch else []
    except ValueError as error:
        refused = str(error)
    except EngineFailedError as error:
        failed = str(error)
    counts, placements = (log.passes, log.rows, spans), dict(balancer.placements)
    return encode(Found(log.name, balancer.view(), placements, *counts, proposal, refused, failed))


class PassLog:
    """Counts the passes of an ffn worker, and measures them while an attention runtime watches.

    Attributes:
      name: names this start of the worker.
      passes, rows: passes so far, and rows of all of them.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.passes = self.rows = 0
        self._measured_until = -math.inf
        self._recorder = Recorder(capacity=MOST_SPANS, paused=True)

    def add(self, layer: int, rows: int, result: StageResult) -> None:
        """Counts a pass that was enqueued now."""
        self.passes, self.rows = self.passes + 1, self.rows + rows
        if time.monotonic() < self._measured_until:
            self._recorder.observe("ffn", 0, layer, self.passes, result)

    def spans(self) -> list[Span]:
        """The passes measured last, since an earlier call; passes are measured for a while."""
        self._measured_until = time.monotonic() + WATCH_SECONDS
        return self._recorder.spans()


def _place(balancer: ExpertBalancer, placements: dict[int, tuple[int, ...]]) -> None:
    sizes = balancer.facts.sizes
    for layer, placement in placements.items():
        if layer not in balancer.placements:
            raise ValueError(f"layer {layer} has no experts to move")
        check_placement(placement, sizes)
    balancer.place(placements)

"""Answers questions of attention runtimes about the experts of an ffn runtime."""

import math
import secrets
import time

from jaxserve.errors import EngineFailedError
from jaxserve.fleet.expert_control import (
    Findings,
    Look,
    RebalanceExperts,
    Restore,
    encode,
    questions,
)
from jaxserve.link.remote.batching import Turns
from jaxserve.model.ffn.placement import check_placement
from jaxserve.observe.recorder import Recorder, StageResult
from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView
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
            case RebalanceExperts(dry_run):
                proposal = balancer.rebalance(dry_run=dry_run)
            case Restore(placements):
                _place(balancer, placements)
            case Look(watch):
                spans = log.spans() if watch else []
    except ValueError as error:
        refused = str(error)
    except EngineFailedError as error:
        failed = str(error)
    placements, told = dict(balancer.placements), (spans, proposal, refused, failed)
    return encode(Findings(log.name, balancer.view(), placements, log.work, *told))


class PassLog:
    """Counts the passes of an ffn worker, and measures them while an attention runtime watches.

    Args:
      policy: chooses the messages of passes.

    Attributes:
      name: names this start of the worker.
    """

    def __init__(self, policy: Turns):
        self.name = secrets.token_hex(4)
        self._passes = self._messages = self._rows = 0
        self._policy = policy
        self._measured_until = -math.inf
        self._recorder = Recorder(capacity=MOST_SPANS, paused=True)

    def add(self, layer: int, messages: int, rows: int, result: StageResult) -> None:
        """Counts a pass that was enqueued now, with its messages and the rows of all of them."""
        self._passes, self._messages = self._passes + 1, self._messages + messages
        self._rows += rows
        if time.monotonic() < self._measured_until:
            self._recorder.observe("ffn", 0, layer, self._passes, result)

    @property
    def work(self) -> FFNWorkerView:
        """Counts since the start, without the worker's address."""
        return FFNWorkerView(
            passes=self._passes,
            messages=self._messages,
            rows=self._rows,
            left_behind=self._policy.left_behind,
            misjudged=self._policy.misjudged,
        )

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

"""Answers questions of attention runtimes about the experts of an ffn runtime."""

import math
import secrets
import time
from collections import Counter
from typing import Any

from jaxserve.errors import EngineFailedError
from jaxserve.fleet import expert_control
from jaxserve.link.remote.batching import Turns
from jaxserve.model.ffn.placement import check_placement
from jaxserve.observe.recorder import Recorder, StageResult
from jaxserve.observe.spans import PassFill, Span
from jaxserve.observe.view import FFNWorkerView
from jaxserve.roles.expert_balancer import ExpertBalancer

MOST_SPANS = 2048
"""Most passes that are kept."""
WATCH_SECONDS = 30.0
"""How long passes are measured after an attention runtime asked for them."""


def answer(balancer: ExpertBalancer | None, log: "PassLog", question: bytes) -> bytes:
    """Returns the ffn runtime's answer to a question; a model without experts has no balancer.
    Called from any thread but the one that carries actions out.

    Raises:
      msgspec.DecodeError: the bytes are no question.
    """
    asked, found = expert_control.questions.decode(question), dict[str, Any]()
    try:
        match asked, balancer:
            case expert_control.Look(watch), _:
                found["spans"] = log.spans() if watch else []
            case expert_control.RebalanceExperts(dry_run), ExpertBalancer() as mover:
                found["proposal"] = mover.rebalance(dry_run=dry_run)
            case expert_control.Restore(placements), ExpertBalancer() as mover:
                _place(mover, placements)
            case _:
                raise ValueError("the model has no experts to move")
    except ValueError as error:
        found["refused"] = str(error)
    except EngineFailedError as error:
        found["failed"] = str(error)
    if balancer is not None:
        found |= {"view": balancer.view(), "placements": dict(balancer.placements)}
    return expert_control.encode(expert_control.Findings(log.name, work=log.work, **found))


class PassLog:
    """Counts the passes of an ffn worker, and measures them while an attention runtime watches.

    Args:
      policy: chooses the messages of passes.

    Attributes:
      name: names this start of the worker.
    """

    def __init__(self, policy: Turns):
        self.name = secrets.token_hex(4)
        self._sums: Any = Counter()
        """Fields of `FFNWorkerView`."""
        self._policy, self._left_behind = policy, 0
        self._measured_until = -math.inf
        self._recorder = Recorder(capacity=MOST_SPANS, paused=True)

    def add(self, layer: int, messages: int, rows: int, result: StageResult | None) -> None:
        """Counts a pass just enqueued, its messages and their rows; `result` is ready with it."""
        places, left_behind = self._policy.places, self._policy.left_behind
        self._sums.update(passes=1, messages=messages, rows=rows, places=places)
        if result is not None and time.monotonic() < self._measured_until:
            fill = PassFill(messages, places, left_behind - self._left_behind)
            self._recorder.observe("ffn", 0, layer, self._sums["passes"], result, fill=fill)
        self._left_behind = left_behind

    @property
    def work(self) -> FFNWorkerView:
        """Counts since the start, without the worker's address."""
        left_behind, misjudged = self._policy.left_behind, self._policy.misjudged
        return FFNWorkerView(**self._sums, left_behind=left_behind, misjudged=misjudged)

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

"""Experts of an ffn runtime of its own, as an attention runtime that uses it sees them: figures,
rebalancing by hand, and the placement that a restarted worker is told.

An attention runtime asks over the link that it has (`link.remote.client.MessageClient.ask`); the
process that moves the experts answers (`expert_answers.py`). It also remembers the placement: an
ffn worker that begins anew has every expert at home and its spare slots empty, and is told to move
them to where they were. The old placement serves until each round is done, so that a worker lost in
the middle of a move loses nothing but the move.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.errors import EngineFailedError
from jaxserve.fleet.expert_control import Findings, Look, RebalanceExperts, Restore, answers, encode
from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.worker import Action, Proposal

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often an attention runtime asks where experts are."""
ANSWER_SECONDS = 15.0
"""How long an answer may take: counts are read for a rebalance."""

Ask = Callable[[bytes, float], bytes]
"""(question, seconds) → the answer of the ffn worker in use; raises EngineFailedError."""


class RemoteExperts:
    """Experts that another runtime moves: nothing is ever due here. Started and closed by the
    engine.

    Args:
      ask: reaches the ffn worker in use.
      seconds: between two looks.
      where: returns that worker's address.
    """

    def __init__(
        self, ask: Ask, seconds: float = LOOK_SECONDS, where: Callable[[], str] = lambda: ""
    ):
        self._ask, self._where, self._seconds = ask, where, seconds
        self._found: Findings | None = None
        self._remembered: Findings | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-experts", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Ends looking."""
        self._closed.set()

    def due(self) -> Sequence[Action]:
        """Nothing."""
        return ()

    def carried_out(self, actions: Sequence[Action]) -> None:
        """Never called with any."""

    def view(self) -> ExpertView:
        """Returns the figures that were found last."""
        found = self._found
        return ExpertView() if found is None else found.view

    def passes(self, timeout: float) -> tuple[FFNWorkerView, list[Span]]:
        """Returns the ffn worker in use and its passes that were measured last.

        Raises:
          EngineFailedError: no ffn worker answers.
        """
        found = self._question(Look(watch=True), timeout)
        return msgspec.structs.replace(found.work, name=self._where()), found.spans

    def rebalance(self, *, dry_run: bool) -> Proposal:
        """Has the ffn worker in use rebalance; see `ExpertBalancer.rebalance`."""
        found = self._question(RebalanceExperts(dry_run))
        if found.refused:
            raise ValueError(found.refused)
        if found.proposal is None:
            raise EngineFailedError(found.failed or "experts: no proposal")
        return found.proposal

    def look(self) -> None:
        """Looks once, and tells a worker that began anew where its experts were.

        The placement is remembered until the worker has finished a rebalance: one that is lost on
        the way leaves it to its successor.

        Raises:
          EngineFailedError: no ffn worker answers.
        """
        before, now = self._remembered, self._question(Look())
        if before is not None and _began_anew(before, now):
            if not now.view.moving:
                now = self._question(Restore(before.placements))
                what = now.refused or "moves them to where they were"
                logger.info("experts: ffn worker %s %s", now.worker, what)
            if now.view.moving:
                return
        self._remembered = now

    def _question(
        self, question: Look | RebalanceExperts | Restore, seconds: float = ANSWER_SECONDS
    ) -> Findings:
        with self._lock:
            data = self._ask(encode(question), seconds)
            try:
                self._found = found = answers.decode(data)
            except msgspec.DecodeError as error:
                raise EngineFailedError(f"experts: {error}") from None
        return found

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                self.look()
            except EngineFailedError as error:
                logger.debug("experts: %s", error)
            except Exception:  # a successor must still hear of the placement
                logger.exception("experts: looking for them")


def _began_anew(before: Findings, now: Findings) -> bool:
    """Whether this is another worker, which has finished no rebalance and has experts elsewhere."""
    same = before.worker == now.worker or before.placements == now.placements
    return not same and not now.view.epoch

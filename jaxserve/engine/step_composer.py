"""Composes a lane's next step: which rows decode or prefill, how many tokens, how many drafts.

Called by `scheduler.py`, whose docstring has the policy (3 to 6). Pages for decoding and for drafts
are handed out here; pages of prompts are allocated at admission. `step_policies.py` decides whether
drafts pay and how large chunks may be. `grammar_wait` tells which rows wait because a grammar has
to see their last token.
"""

import pkgutil
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxserve.engine.admission import rank
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots, StepInFlight
from jaxserve.engine.sequence import SchedulerSizes, Sequence

if TYPE_CHECKING:
    from jaxserve.engine.spread import SpreadPrompt
    from jaxserve.engine.step_policies import ChunkPolicy, DraftPolicy

SPREAD = "jaxserve.engine.spread:SpreadPrompt"
"""Loaded for deployments with `scheduler.spread` alone."""
GRAMMARS_THAT_STOP_A_LANE = 4
"""The whole lane waits if one in this number of its sequences has a grammar. With fewer grammars,
only those sequences skip every second step, which costs less than an eighth of the tokens."""


def grammar_wait(slots: LaneSlots) -> Literal["none", "grammars", "lane"]:
    """Tells which rows of a lane wait for a token in flight: none, those with a grammar, or all."""
    if not (slots.grammar & (slots.pending > 0)).any():
        return "none"
    return "lane" if _stops(slots) else "grammars"


def _stops(slots: LaneSlots) -> bool:
    """Returns whether enough sequences have a grammar that the whole lane waits."""
    running, grammars = int(slots.running.sum()), int((slots.running & slots.grammar).sum())
    return 0 < running <= GRAMMARS_THAT_STOP_A_LANE * grammars


def others_are_late(
    lane: int,
    lanes: Items[LaneSlots],
    in_flight: Items[deque[StepInFlight]],
    completed_at: Items[int],
) -> bool:
    """Returns whether a lane that stops for grammars should wait for another such lane, whose step
    in flight was issued before this lane's last one was complete.

    Args:
      lanes, in_flight: lanes of the domain, and their steps in flight.
      completed_at: steps that the domain had issued when each lane's last one was complete.
    """
    if in_flight[lane]:
        return False
    return _stops(lanes[lane]) and any(
        steps and steps[-1].number < completed_at[lane] and grammar_wait(lanes[other]) == "lane"
        for other, steps in enumerate(in_flight)
    )


BESIDE_PREFILL = 8
"""Inverse of the share of the token budget that drafts may take while prompts could use it."""


class StepComposer:
    """Composes the steps of all lanes of one domain.

    Args:
      groups: the scheduler's; pages are taken from them.
      policy: whether the next steps have drafts; None: no step has.
      pace: how large steps with decoding and prefilling rows may be; None: as the budget says.
      preempt: takes the pages of a running sequence, once none of its steps is in flight.
    """

    def __init__(
        self,
        groups: Items[DPGroup],
        sizes: SchedulerSizes,
        policy: "DraftPolicy | None",
        pace: "ChunkPolicy | None",
        preempt: Callable[[Sequence], None],
    ):
        self._groups, self._sizes, self._policy, self._pace = groups, sizes, policy, pace
        self._prefill_tokens = sizes.prefill_tokens or sizes.token_budget
        self.token_budget: Callable[[], int] = lambda: sizes.token_budget
        """Tells how many tokens a DP group and step may have now, at least those that decode."""
        self._preempt = preempt
        self.spread: SpreadPrompt | None = None
        if sizes.spread:
            self.spread = pkgutil.resolve_name(SPREAD)(groups, sizes, preempt)

    def give_pages(self, slots: LaneSlots, decoding: np.ndarray) -> None:
        """Gives pages to decoding sequences that need one for their next token, by their rank.
        Clears the rows of `decoding` (a mask) that get no page or are preempted."""
        short = slots.sequences[decoding & (slots.cached + slots.slack >= slots.room)]
        for sequence in sorted(short, key=rank):
            if sequence.status == "running":  # else it was preempted just now
                row = sequence.place.row
                decoding[row] = self._give_page(sequence)
        decoding &= slots.running

    def _give_page(self, sequence: Sequence) -> bool:
        """Gives a sequence another page, if need be by preemption. Returns False if that fails."""
        group = self._groups[sequence.place.group]
        # Freed pages go to those first that missed a step and are due earlier. Otherwise a sequence
        # that is due later could take each page as it comes, and they would wait for ever.
        owed = sum(other.rank < sequence.rank for other in group.stalled)
        group.stalled.add(sequence)
        while group.free_pages <= owed:
            if group.leaving:  # pages are on their way: another preemption would free none sooner
                return False
            # The loop ends: the pages of a preempted sequence are free at once, or a step of it is
            # in flight, and then the group is `leaving`.
            last_due = max(group.residents(), key=rank)
            self._preempt(last_due)
            if last_due is sequence:
                return False
        group.grow(sequence)
        return True

    def drafts(
        self, slots: LaneSlots, decoding: np.ndarray, prefilling: np.ndarray
    ) -> np.ndarray | None:
        """Returns the number of drafts that the step verifies in every row.

        None: it verifies none and proposes none for the next step. Prediction modules take part in
        every step that prefills, even where the policy wants no drafts, because pages of prompts
        are published and later sequences draft from the modules' entries there. Pages for drafts
        are taken only from those that no stalled sequence waits for.
        """
        if (policy := self._policy) is None:
            return None
        prefills, rows = bool(prefilling.any()), int(decoding.sum() + prefilling.sum())
        most = policy.choose(rows, prefills=prefills) if rows else 0
        if not (most or (prefills and self._sizes.modules)):
            return None
        drafts = slots.drafts(decoding, most)
        if prefills:
            drafts = self._beside_prefill(slots, decoding, prefilling, drafts)
        reach = slots.cached + slots.slack + 1
        wanted = np.minimum(reach + drafts + self._sizes.ahead, slots.most_cached)
        for row in np.flatnonzero((drafts > 0) & (wanted > slots.room)).tolist():
            sequence = slots.sequences[row]
            group = self._groups[sequence.place.group]
            while wanted[row] > slots.room[row]:
                if group.free_pages <= len(group.stalled):
                    drafts[row] = min(drafts[row], slots.room[row] - reach[row])
                    break
                group.grow(sequence)
        return drafts

    def _beside_prefill(
        self, slots: LaneSlots, decoding: np.ndarray, prefilling: np.ndarray, drafts: np.ndarray
    ) -> np.ndarray:
        """Reduces the drafts to the room that prompts leave. The first rows keep theirs."""
        of_groups, budget = (-1, self._sizes.slots), self.token_budget()
        unfed = np.where(prefilling, slots.length - slots.cached, 0)
        wanted = np.minimum(unfed.reshape(of_groups).sum(axis=1), self._prefill_tokens)
        left = budget - decoding.reshape(of_groups).sum(axis=1) - wanted
        most = np.maximum(left, budget // BESIDE_PREFILL)
        drafts = drafts.reshape(of_groups)
        fit = np.cumsum(drafts, axis=1) <= most[:, None]
        return np.where(fit, drafts, 0).reshape(-1)

    def chunks(
        self,
        slots: LaneSlots,
        decoding: np.ndarray,
        prefilling: np.ndarray,
        drafts: np.ndarray | None,
    ) -> dict[int, int]:
        """Returns row → tokens that the step prefills, beside decoding rows and their drafts.
        `decoding` and `prefilling` are masks over rows."""
        sequences = sorted(slots.sequences[prefilling], key=rank)
        if not sequences:
            return {}
        decoded = decoding if drafts is None else decoding + drafts
        used = decoded.reshape(-1, self._sizes.slots).sum(axis=1).tolist()
        most = self.token_budget()
        if self._pace is not None and any(used):
            context = int(slots.cached[sequences[0].place.row])
            most = min(most, self._pace.choose(max(used), context))
        budget = [most - tokens for tokens in used]
        if any(used):
            budget = [min(left, self._prefill_tokens) for left in budget]
        chunks: dict[int, int] = {}
        groups_left = sum(left > 0 for left in budget)
        for sequence in sequences:
            if not groups_left:  # a backlog may be thousands of prompts long
                break
            group, _, row = sequence.place
            if (count := min(slots.unfed(row), budget[group])) > 0:
                chunks[row] = count = self._to_page_end(int(slots.cached[row]), count)
                budget[group] -= count
                groups_left -= not budget[group]
        if self.spread is not None and self.token_budget() == self._sizes.token_budget:
            self.spread.divide(slots, sequences, chunks, budget)
        return chunks

    def _to_page_end(self, cached: int, count: int) -> int:
        """Shortens a chunk behind `cached` tokens that passes the end of a page, if later sequences
        may start from the state there."""
        size, inside = self._sizes.page_size, cached % self._sizes.page_size
        states = self._sizes.recurrent and self._sizes.prefix_cache
        if not states or inside + count <= size:
            return count
        return size - inside if inside else count // size * size

"""What a lane's next step holds: who decodes, how many drafts are verified, who prefills how much.

Called by `scheduler.py`, whose docstring has the policy (3 to 5). Pages for decoding and for drafts
are handed out here; those of prompts are allocated at admission.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from jaxserve.engine.admission import rank
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.drafting import DraftPolicy
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.sequence import Sequence, group_of

BESIDE_PREFILL = 8
"""Drafts take a part of the token budget that prompts could use, but no more than one in this."""


class StepComposer:
    """Composes the steps of all lanes of one domain.

    Args:
      groups: the scheduler's; pages are taken from them.
      slots: sequences a DP group and lane.
      token_budget: most tokens a DP group and step.
      prefill_tokens: most prefill tokens a DP group and step beside decoding.
      policy: whether the next steps have drafts; None: no step has.
      modules: Prediction modules that propose drafts; 0: they are looked up.
      ahead: cache entries behind those of a step that drafts are written to.
      preempt: takes its pages from a running sequence, as soon as no step of it is in flight.
    """

    def __init__(
        self,
        groups: Items[DPGroup],
        *,
        slots: int,
        token_budget: int,
        prefill_tokens: int,
        policy: DraftPolicy | None,
        modules: int,
        ahead: int,
        preempt: Callable[[Sequence], None],
    ):
        self._groups, self._slots = groups, slots
        self._token_budget, self._prefill_tokens = token_budget, prefill_tokens
        self._policy, self._modules, self._ahead = policy, modules, ahead
        self._preempt = preempt

    def give_pages(self, slots: LaneSlots, decoding: np.ndarray) -> None:
        """Gives pages to decoding sequences whose next token has none, the first due first.

        Removes the rows from `decoding` (a mask) that get none, and those that are preempted.
        """
        short = slots.sequences[decoding & (slots.cached + slots.slack >= slots.room)]
        for sequence in sorted(short, key=rank):
            if sequence.status == "running":  # else it was preempted just now
                row = slots.row(sequence)
                decoding[row] = self._give_page(sequence)
        decoding &= slots.running

    def _give_page(self, sequence: Sequence) -> bool:
        """Whether a sequence gets another page, by preemption if need be."""
        group = self._groups[group_of(sequence)]
        owed = sum(other.rank < sequence.rank for other in group.stalled)
        group.stalled.add(sequence)
        while group.free_pages <= owed:
            if group.leaving:
                return False
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
        every step that prefills, even where the policy wants no drafts: pages of prompts are
        published, and later sequences draft from the modules' entries there.
        Pages for drafts are taken from those that no stalled sequence waits for.
        """
        policy, prefills = self._policy, bool(prefilling.any())
        rows = int(decoding.sum() + prefilling.sum())
        most = policy.choose(rows, prefills=prefills) if policy is not None and rows else 0
        if policy is None or not (most or (prefills and self._modules)):
            return None
        drafts = slots.drafts(decoding, most)
        if prefills:
            drafts = self._beside_prefill(slots, decoding, prefilling, drafts)
        reach = slots.cached + slots.slack + 1
        wanted = np.minimum(reach + drafts + self._ahead, slots.most_cached)
        for row in np.flatnonzero((drafts > 0) & (wanted > slots.room)).tolist():
            sequence = slots.sequences[row]
            group = self._groups[group_of(sequence)]
            while wanted[row] > slots.room[row]:
                if group.free_pages <= len(group.stalled):
                    drafts[row] = min(drafts[row], slots.room[row] - reach[row])
                    break
                group.grow(sequence)
        return drafts

    def _beside_prefill(
        self, slots: LaneSlots, decoding: np.ndarray, prefilling: np.ndarray, drafts: np.ndarray
    ) -> np.ndarray:
        """As many of the drafts, the first rows first, as prompts leave room for."""
        unfed = np.where(prefilling, slots.length - slots.cached, 0)
        wanted = np.minimum(unfed.reshape(-1, self._slots).sum(axis=1), self._prefill_tokens)
        left = self._token_budget - decoding.reshape(-1, self._slots).sum(axis=1) - wanted
        most = np.maximum(left, self._token_budget // BESIDE_PREFILL)
        drafts = drafts.reshape(-1, self._slots)
        fit = np.cumsum(drafts, axis=1) <= most[:, None]
        return np.where(fit, drafts, 0).reshape(-1)

    def chunks(
        self,
        slots: LaneSlots,
        decoding: np.ndarray,
        prefilling: np.ndarray,
        drafts: np.ndarray | None,
    ) -> dict[int, int]:
        """Row → tokens that the step prefills, beside those that decode and their drafts; both are
        masks over rows."""
        sequences = sorted(slots.sequences[prefilling], key=rank)
        if not sequences:
            return {}
        decoded = decoding if drafts is None else decoding + drafts
        used = decoded.reshape(-1, self._slots).sum(axis=1).tolist()
        budget = [self._token_budget - tokens for tokens in used]
        if any(used):
            budget = [min(left, self._prefill_tokens) for left in budget]
        chunks: dict[int, int] = {}
        groups_left = sum(left > 0 for left in budget)
        for sequence in sequences:
            if not groups_left:  # a backlog may be thousands of prompts long
                break
            row, group = slots.row(sequence), group_of(sequence)
            if (count := min(slots.unfed(row), budget[group])) > 0:
                chunks[row] = count
                budget[group] -= count
                groups_left -= not budget[group]
        return chunks

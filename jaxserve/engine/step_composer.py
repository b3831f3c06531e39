"""Composes a lane's next step: who decodes, how many drafts are verified, who prefills how much.

Called by `scheduler.py`, whose docstring has the policy (3 to 6). Pages for decoding and for drafts
are handed out here; those of prompts are allocated at admission. `DraftPolicy` decides whether
drafts pay: they make a step longer and give it more tokens, so they pay where a step's time hardly
depends on its tokens, that is, with few sequences. `grammar_wait` says which rows wait because a
grammar has to see its last token first.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Literal

import numpy as np

from jaxserve.engine.admission import rank
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots, StepInFlight
from jaxserve.engine.sequence import Sequence

ENOUGH = 8
"""Steps of a size and kind that are measured before they are compared."""
PROBE_STEPS = 4
"""Steps that are taken the other way, to see whether it is the better one by now. None are verified
in the first of them, as none were proposed before."""
FIRST_INTERVAL, LAST_INTERVAL = 256, 4096
"""Steps from probe to probe; twice as many after each that changed nothing. So probes are at most
one step in 64."""
MARGIN = 1.05
"""Factor by which the other way has to be faster before it is taken."""
RECENT = 0.1
"""Weight of a new measurement in a moving average."""
MOST_TIMES = 3.0
"""A step that takes longer than this times the average counts as this times the average."""


class DraftPolicy:
    """Decides for all lanes of a domain, by what their steps took and how many drafts held lately.

    Lanes take turns on the same devices, so they are decided together: beside steps of the other
    kind, neither kind's time could be told.

    Args:
      most: drafts of a sequence and step.
      automatic: whether it decides anything; else every step has drafts.
      lanes: of the domain.
    """

    def __init__(self, most: int, *, automatic: bool, lanes: int = 1):
        self._most, self._automatic = most, automatic
        self._held = float(most)
        """Drafts of a sequence that hold, a moving average."""
        self._held_of = 0
        """How many steps have told."""
        self._seconds: dict[tuple[int, int], tuple[int, float]] = {}
        """By size and drafts: how many steps were measured, and their average."""
        self._probes: dict[int, tuple[int, int]] = {}
        """By size: steps until the next probe ends, and the interval."""
        self._better: dict[int, int] = {}
        self._last = [0] * lanes
        """Drafts of each lane's last complete step."""
        self._took: int | None = None
        """Drafts of the step that took its time last."""

    def choose(self, rows: int, *, prefills: bool = False) -> int:
        """Most drafts of a sequence in the next step, `most` or 0.

        Args:
          rows: sequences that take part.
          prefills: whether some of them prefill. Such steps are not measured, and nothing is tried
            in them: they are as those of about as many sequences that decode.
        """
        if not self._automatic:
            return self._most
        size = rows.bit_length()
        if prefills:
            known = min(self._better, key=lambda other: abs(other - size), default=None)
            return self._most if known is None else self._better[known]
        for drafts in (self._most, 0):
            if self._seconds.get((size, drafts), (0, 0.0))[0] < ENOUGH:
                return drafts
        with_drafts, without = self._seconds[size, self._most][1], self._seconds[size, 0][1]
        gain = (1 + self._held) * without / with_drafts
        before = self._better.get(size)
        least = {None: 1.0, 0: MARGIN, self._most: 1 / MARGIN}[before]
        better = self._most if gain >= least else 0
        left, interval = self._probes.get(size, (FIRST_INTERVAL, FIRST_INTERVAL))
        if before not in (None, better):
            left = interval = FIRST_INTERVAL
        self._better[size] = better
        if left == 0:
            interval = min(2 * interval, LAST_INTERVAL)
            left = interval
        self._probes[size] = left - 1, interval
        return self._most - better if left <= PROBE_STEPS else better

    def completed(
        self, drafts: np.ndarray | None, accepted: np.ndarray | None, lane: int = 0
    ) -> None:
        """A step of a lane is complete, in the order in which they were planned.

        Args:
          drafts: of its rows; None: it had none.
          accepted: how many held.
        """
        before, self._last[lane] = self._last[lane], 0 if drafts is None else self._most
        if drafts is None or accepted is None or not before:
            return
        full = drafts == self._most  # not those near their end
        if full.any():
            self._held_of += 1
            weight = max(RECENT, 1 / self._held_of)
            self._held += weight * (float(accepted[full].mean()) - self._held)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """How long a step took that did nothing but decode.

        It counts only after one of its kind: a prediction module runs when the tokens of its step
        are known already, in the time of the next one.

        Args:
          rows: its sequences.
          drafts: its bucket's.
        """
        before, self._took = self._took, drafts
        if before != drafts:
            return
        size = rows.bit_length()
        count, average = self._seconds.get((size, drafts), (0, seconds))
        weight = max(RECENT, 1 / (1 + count))
        seconds = min(seconds, MOST_TIMES * average)
        self._seconds[size, drafts] = count + 1, average + weight * (seconds - average)


GRAMMARS_THAT_STOP_A_LANE = 4
"""A lane waits as a whole where one sequence in so many has a grammar. With fewer, their missing
every second step costs less than an eighth of the tokens."""


def grammar_wait(slots: LaneSlots) -> Literal["none", "grammars", "lane"]:
    """Which rows of a lane wait for a token in flight: none, those with a grammar, or all."""
    if not (slots.grammar & (slots.pending > 0)).any():
        return "none"
    return "lane" if _stops(slots) else "grammars"


def _stops(slots: LaneSlots) -> bool:
    """Whether enough sequences of a lane have a grammar that the whole lane waits for them."""
    running, grammars = int(slots.running.sum()), int((slots.running & slots.grammar).sum())
    return 0 < running <= GRAMMARS_THAT_STOP_A_LANE * grammars


def others_are_late(
    lane: int,
    lanes: Items[LaneSlots],
    in_flight: Items[deque[StepInFlight]],
    completed_at: Items[int],
) -> bool:
    """Whether a lane that stops for grammars should wait for another such lane, whose step in
    flight was issued before this lane's last one was complete.

    Args:
      lanes, in_flight: of the domain, and their steps.
      completed_at: how many steps the domain had issued when each lane's last one was complete.
    """
    if in_flight[lane]:
        return False
    return _stops(lanes[lane]) and any(
        steps and steps[-1].number < completed_at[lane] and grammar_wait(lanes[other]) == "lane"
        for other, steps in enumerate(in_flight)
    )


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
                row = sequence.place.row
                decoding[row] = self._give_page(sequence)
        decoding &= slots.running

    def _give_page(self, sequence: Sequence) -> bool:
        """Whether a sequence gets another page, by preemption if need be."""
        group = self._groups[sequence.place.group]
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
            group, _, row = sequence.place
            if (count := min(slots.unfed(row), budget[group])) > 0:
                chunks[row] = count
                budget[group] -= count
                groups_left -= not budget[group]
        return chunks

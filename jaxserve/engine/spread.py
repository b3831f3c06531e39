"""Sequence-parallel prompts: the chunks of a long prompt are divided over DP groups.

Loaded by `step_composer.py` where `scheduler.spread` asks for it. A prompt that fills several steps
by itself gets *copies*: residents of other groups, in the same lane, with pages for the whole
prompt. Sequence and copies compute parts of every chunk, and exchange their pages in each layer.
Each therefore has the whole history, and attends to its own pages alone. The sequence computes the
last part, whose last token is sampled. For the rest of the scheduler its prompt advances faster.

A copy is due last of all, and the others continue without it. It goes when a request waits, when
decoding needs its pages, and at the end of the prompt. It feeds what its group's own requests leave
of the token budget, which may be nothing: then it only takes the others' pages over.

The exchange moves every page once. Groups that read the history from one owner would receive it
once a chunk, which grows with the square of the length.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items

from jaxserve.engine.admission import GroupLoad
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.sequence import SchedulerSizes, Sequence
from jaxserve.roles.layout import pages_for


class SpreadPrompt:
    """The prompt of a domain that several DP groups compute; one at a time.

    Args:
      groups: the scheduler's.
      preempt: takes a copy's slot and pages, once none of its steps is in flight.

    Attributes:
      parts: rows that feed parts of a chunk in the step being composed → first token of the part.
    """

    def __init__(
        self, groups: Items[DPGroup], sizes: SchedulerSizes, preempt: Callable[[Sequence], None]
    ):
        self._groups, self._preempt = groups, preempt
        self._page_size, self._budget = sizes.page_size, sizes.token_budget
        self._sequence: Sequence | None = None
        self._waiting = self._last = False
        self.parts: dict[int, int] = {}

    def begin(self, *, waiting: bool) -> None:
        """Begins a step. The copies go if a request waits."""
        self.parts, self._waiting, self._last = {}, waiting, waiting
        self.issued()

    def issued(self) -> None:
        """Called after a step was issued. Behind the last chunk the copies go."""
        for copy in self._sequence.copies if self._last and self._sequence else ():
            self._preempt(copy)

    def divide(
        self, slots: LaneSlots, prompts: Items[Sequence], chunks: dict[int, int], left: list[int]
    ) -> None:
        """Lets copies feed the first parts of a chunk.

        Args:
          prompts: of the lane, by rank.
          chunks: row → tokens of the step; gets those of the parts.
          left: tokens that every group has left.
        """
        if not (self._sequence and any(one.status == "running" for one in self._sequence.copies)):
            self._sequence = next((o for o in prompts if self._copied(slots, o, prompts)), None)
        sequence = self._sequence
        if sequence is None or sequence not in prompts or sequence.place.row not in chunks:
            return
        copies = [copy for copy in sequence.copies if copy.status == "running"]
        row, page = sequence.place.row, self._page_size
        start = place = int(slots.cached[row])
        unfed = slots.unfed(row)
        for number, copy in enumerate(copies, 1):
            even = start + unfed * number // (1 + len(copies)) + page - 1
            most = min(even, place + left[copy.place.group], start + unfed - 1)
            stop = max(place, most // page * page)
            self.parts[copy.place.row], chunks[copy.place.row] = place, stop - place
            place = stop
        self.parts[row], chunks[row] = place, min(chunks[row], start + unfed - place)
        self._last = place + chunks[row] >= start + unfed - 1  # one token more is as in decoding

    def _copied(self, slots: LaneSlots, sequence: Sequence, prompts: Items[Sequence]) -> bool:
        """Makes copies of a prompt, one for each step that it fills but the first, in groups that
        have its history, room for the rest, and no long prompt of their own. Returns whether one
        was made."""
        (_, lane, row), page = sequence.place, self._page_size
        cached, tokens = int(slots.cached[row]), sequence.tokens
        wanted = (slots.unfed(row) - 1) // self._budget
        # Counted or scored tokens pass through one slot; pages that may be damaged stay alone.
        alone = sequence.request.params.penalises or sequence.unscored or sequence.poisoned
        if self._waiting or alone or not wanted or not slots.fresh[row] or cached % page:
            return False
        pages, sequence.copies = pages_for(len(tokens), page), []
        busy = {one.place.group for one in prompts if slots.unfed(one.place.row) > self._budget}
        more = 1 + len(tokens) - len(sequence.request.prompt)
        for group in self._groups:
            if len(sequence.copies) == wanted:
                break
            if group.index in busy or not group.has_slot(lane):
                continue
            prefix = group.cache.match(sequence.keys, cached) if group.cache else []
            if len(prefix) * page == cached and GroupLoad(group).cost(pages, prefix) is not None:
                rank = math.inf, group.index
                copy = Sequence(sequence.request, rank, more, tokens, sequence.keys)
                group.admit(copy, lane, pages, prefix)
                slots.longest[copy.place.row] = 0  # gets no step of its own
                sequence.copies.append(copy)
        return bool(sequence.copies)

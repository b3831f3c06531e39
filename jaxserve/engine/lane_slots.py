"""The sequences of one lane in arrays, so that a decode step costs no Python per sequence.

A row is a slot counted over all DP groups, `group * slots + slot`, as in `StepPlan`. Written by the
scheduler and by `DPGroup`; decides nothing: the policy is in `scheduler.py`.

A sequence of P prompt tokens and g generated ones has P + g tokens. The last one is fed in its next
step, so the cache holds P + g - 1 entries before it. Steps run on the device while the host plans
the next one, hence two more counts: `pending`, tokens that were sampled on the device and that the
host has not seen, and `in_flight`, steps issued and not yet complete. A slot keeps its sequence
until its last step in flight is complete.

A step may feed drafts behind a row's last token; those that turn out right become tokens. Their
number is known when the step is complete. Until then every step counts as one token, the least that
it samples, and `slack` is the number of further tokens that the row may have.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxserve.engine.sequence import SchedulerSizes, Sequence
from jaxserve.roles.step_arrays import FROM_DEVICE
from jaxserve.roles.step_plan import RowOptions, SaidTokens, StepPlan, words

RECENT_TOKENS = 256
"""Tokens of a sequence kept in the lane's array before they are appended to the sequence's own."""


class StepInFlight(NamedTuple):
    """A step that is issued and not complete. Each array has one entry for each row of the step."""

    number: int
    rows: np.ndarray
    counts: np.ndarray
    """Tokens that the step adds to the cache, without drafts."""
    samples: np.ndarray
    """True if the step samples a token for the row."""
    kv_lengths: np.ndarray
    """Cache entries after the step, at least."""
    drafts: np.ndarray | None = None
    """Drafts among the tokens that the step feeds; None: it feeds no drafts."""


class LaneSlots:
    """Holds all rows of one lane; every array has one entry per row.

    A resident sequence's own tokens may lack the last ones: see `write_back`.

    Args:
      lane: number of the lane.
    """

    def __init__(self, lane: int, sizes: SchedulerSizes):
        self.lane, self.groups, self.slots = lane, sizes.groups, sizes.slots
        self.page_size, self._sizes = sizes.page_size, sizes
        self.open_ring: list[Callable[[Sequence, int, int], None] | None] = []
        """Gives a sequence ring pages up to a place among its pages, from another place on, by DP
        group; None without layers that have a window or states."""
        rows = sizes.groups * sizes.slots

        def counts() -> np.ndarray:
            return np.zeros(rows, np.int32)

        def flags() -> np.ndarray:
            return np.zeros(rows, bool)

        self.sequences = np.full(rows, None, object)
        """Resident `Sequence` of the row, or None. Entries below describe that sequence."""
        self.running = flags()
        """True if the sequence's status is "running"."""
        self.ended = flags()
        """True if the sequence's status is "ended"."""
        self.resident = flags()
        """True if the row has a sequence."""
        self.length = counts()
        """Tokens of the sequence, including pending ones."""
        self.longest = counts()
        """Number of tokens at which the sequence ends."""
        self.most_cached = counts()
        """Cache entries in all pages that the sequence may ever need."""
        self.cached = counts()
        """Tokens in the KV cache once every issued step has run."""
        self.pending = counts()
        """Tokens sampled in steps in flight, unknown to the host."""
        self.in_flight = counts()
        """Steps issued and not complete."""
        self.slack = counts()
        """Drafts in flight: the most by which `cached` and `length` may be too low."""
        self.room = counts()
        """Tokens that the sequence's pages have room for."""
        self.found = counts()
        """Tokens that were in the KV cache when the sequence took the row."""
        self.fresh = flags()
        """True if no step was issued since the sequence took the row."""
        self.fetching = flags()
        """True while the sequence waits, without steps, for pages of a prefill worker."""
        self.grammar = flags()
        self.options = flags()
        """True if the request needs more from a step than a sampled token."""
        self.draftable = flags()
        """True if steps may feed drafts for the sequence."""
        self.banned_until = counts()
        """Number of tokens, prompt included, below which the sequence may not end."""
        self.proposed = flags()
        """True if drafts were proposed after the sequence's last step."""
        self.recorded = counts()
        """Number of first tokens that the workers are known to have for looking up drafts."""
        self.last_token = counts()
        """Last token of the sequence that the host knows."""
        self.recent = np.zeros((rows, RECENT_TOKENS), np.int32)
        """Last known tokens, as far as they were not appended to the sequence's own yet."""
        self.recent_count = counts()
        self.published = counts()
        """Full pages already offered to the prefix cache."""
        self.told = flags()
        """True if the workers have the sequence's sampling parameters."""
        self.pages_told = counts()
        """Number of the sequence's pages that the workers know."""
        self.rings_told = counts()
        """Place behind the last page of the sequence's ring that the workers know."""

    def take(self, row: int, sequence: Sequence, cached: int) -> None:
        """Puts a sequence, which has its first pages, into a free row.

        Args:
          cached: tokens of the sequence that are already in the KV cache.
        """
        self.sequences[row] = sequence
        self.running[row] = self.resident[row] = self.fresh[row] = True
        self.ended[row] = self.told[row] = self.fetching[row] = False
        self.length[row], self.longest[row] = len(sequence.tokens), sequence.longest
        self.cached[row] = self.found[row] = cached
        self.pending[row] = self.in_flight[row] = self.pages_told[row] = self.slack[row] = 0
        self.rings_told[row] = 0
        self.most_cached[row] = -(-sequence.longest_cache // self.page_size) * self.page_size
        self.draftable[row], self.proposed[row] = sequence.draftable, False
        self.recorded[row], self.banned_until[row] = 0, sequence.banned_until
        self.room[row] = len(sequence.page_ids) * self.page_size
        self.grammar[row], self.options[row] = sequence.has_grammar, sequence.has_options
        self.last_token[row] = sequence.tokens[-1]
        self.published[row] = len(sequence.prefix)

    def clear(self, row: int) -> None:
        """Frees a row."""
        self.write_back(row)
        self.sequences[row] = None
        self.running[row] = self.resident[row] = self.ended[row] = False

    def stop(self, row: int, *, ended: bool) -> None:
        """Issues no further steps for the row's sequence, which was preempted or has ended."""
        self.write_back(row)
        self.running[row] = False
        self.ended[row] = ended

    def decoding(self) -> np.ndarray:
        """Returns the rows (a mask) whose next step feeds one token, not a prefill chunk."""
        return self._wanting() & self._decodes()

    def prefilling(self, decoding: np.ndarray) -> np.ndarray:
        """Returns the rows (a mask) that have tokens to prefill and are not in `decoding`."""
        return self._wanting() & ~decoding & (self.fresh | ~self._decodes())

    def _wanting(self) -> np.ndarray:
        """Returns the rows (a mask) with a token to feed: without those whose tokens in flight
        already reach the end, or might reach beyond the last page."""
        ends = (self.length >= self.longest) | (self.cached + self.slack >= self.most_cached)
        return self.running & ~self.fetching & ~ends

    def drafts(self, decoding: np.ndarray, most: int) -> np.ndarray:
        """Returns the number of drafts, at most `most`, that each row may be given: none beyond its
        end or last page, and none for rows without proposed drafts.

        A state that others may start from is in the page of the last token that it has been fed
        for certain, and the next step looks for it in the page before its first token. Both are
        one page if drafts end with the page of the token before them.
        """
        left = np.minimum(self.longest - self.length, self.most_cached - self.cached - self.slack)
        # Either all tokens of a step may end the sequence or none; the same in the next step.
        ban = np.where(
            self.length < self.banned_until, self.banned_until - self.slack, self.longest + 1
        )
        left = np.minimum(left, ban - self.length - 1)
        count = np.minimum(left - 1, most)
        if self._sizes.recurrent and self._sizes.prefix_cache:
            size, last = self.page_size, self.cached + self.slack
            most = (self.cached // size == last // size) * (size - 1 - last % size)
            count = np.minimum(count, most)
        return np.where(decoding & self.draftable & self.proposed, np.maximum(count, 0), 0)

    def _decodes(self) -> np.ndarray:
        return (self.cached > 0) & (self.length - self.cached == 1)

    def issue(
        self,
        number: int,
        decode: np.ndarray,
        chunks: dict[int, int],
        drafts: np.ndarray | None = None,
        parts: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[StepPlan, StepInFlight]:
        """Makes the lane's next step and counts it as issued.

        Args:
          number: number of the step.
          decode: rows that decode a token, ascending.
          chunks: row → tokens to prefill.
          drafts: drafts of every row of the lane; None feeds none and proposes none afterwards.
          parts: rows that feed parts of one prompt's chunk → first token of the part.
        """
        for row, start in parts.items():
            self.cached[row] = start
        proposes = drafts is not None
        if drafts is not None and self._sizes.looks_up and not drafts.any():
            drafts = None
        rows, counts = decode, np.ones(len(decode), np.int32)
        if drafts is not None:
            counts += drafts[decode]
        if chunks:
            rows = np.concatenate([decode, np.asarray([*chunks], decode.dtype)])
            counts = np.concatenate([counts, np.asarray([*chunks.values()], np.int32)])
            order = np.argsort(rows)
            rows, counts = rows[order], counts[order]
        own = None if drafts is None else drafts[rows]
        # Drafts may turn out wrong, so lengths count what is certain; `slack` has the rest until
        # the step is complete, and pages are given for both.
        certain = counts if own is None else counts - own
        kv_lengths = self.cached[rows] + certain
        # Only behind its last token is a sequence sampled: a prompt's other tokens are known. A
        # last token in flight is on the device alone, which feeds it.
        samples = kv_lengths == self.length[rows]
        token_ids = np.where(self.pending[rows] > 0, FROM_DEVICE, self.last_token[rows])
        if own is not None:
            first, token_ids = token_ids, np.full(counts.sum(), FROM_DEVICE, np.int32)
            some = counts > 0
            token_ids[(np.cumsum(counts) - counts)[some]] = first[some]
        elif chunks:
            token_ids = np.repeat(token_ids, counts)
        if chunks:
            token_ids = self._with_chunks(token_ids, rows, counts, chunks)
        sample_counts = samples if own is None else samples * (1 + own)
        added, ends = certain, kv_lengths
        tokens = int(
            counts.sum() if self.groups == 1 else np.bincount(rows // self.slots, counts).max()
        )
        if parts:  # each row has the whole chunk in its pages afterwards
            at, added, ends = np.searchsorted(rows, [*parts]), added.copy(), ends.copy()
            ends[at] = end = kv_lengths[at].max()
            added[at] = end - min(parts.values())
            tokens = self._sizes.token_budget
        lengths, told, unknown = kv_lengths, ends, b""
        if self._sizes.drafts:
            lengths = kv_lengths if own is None else kv_lengths + own
            reach = lengths + (slack := self.slack[rows])
            least = np.maximum(reach, ends)
            told = np.maximum(np.minimum(reach + self._sizes.ahead, self.room[rows]), least)
            unknown = words(rows[slack > 0])
        options = self._options(rows, counts, samples)
        has_rules = any(one.rules is not None for one in options)
        pages = -(-int(told.max()) // self.page_size)
        large = bool(options) and own is None  # small steps have none
        bucket_tokens = max(tokens, self.slots) if large else tokens
        drafts_of_bucket = 0 if own is None else self._sizes.drafts
        plan = StepPlan(
            self.lane,
            number,
            self._sizes.bucket(bucket_tokens, pages, drafts_of_bucket, spread=bool(parts)),
            columns=np.array([rows, counts, lengths, sample_counts], "<i4").tobytes(),
            tokens=words(token_ids),
            new_sequences=[
                self.sequences[row].sampling(row) for row in rows[~self.told[rows]].tolist()
            ],
            pages=self._new_pages(rows, told, kv_lengths),
            options=options,
            row_temperatures=self._temperatures(rows) if has_rules else b"",
            on_device=unknown,
            proposes=proposes,
            said=self._unrecorded(rows) if proposes and self._sizes.looks_up else [],
            upcoming=self._upcoming(rows[~samples], kv_lengths[~samples]) if proposes else b"",
            spread=[*parts],
        )
        if own is not None:
            self.slack[rows] += own
        self.proposed[rows] = proposes
        if proposes:
            self.recorded[rows] = kv_lengths
        self.cached[rows] = ends
        self.length[rows] += samples
        self.pending[rows] += samples
        self.in_flight[rows] += 1
        self.fresh[rows] = False
        self.told[rows] = True
        return plan, StepInFlight(number, rows, added, samples, ends, own)

    def filled(self, step: "StepInFlight") -> list[tuple[Sequence, int]]:
        """Returns the sequences whose pages may go to the prefix cache after a complete step: those
        with new full pages, or with a ring page that no step reads any more, and those that leave;
        each with its tokens in the KV cache.

        A page that the cache has of another sequence is offered again with the next one.
        """
        cached, rows = self.known_cached(step), step.rows
        # Grows with each full page, and with each page that the window has left behind.
        edges = cached // self.page_size
        if window := self._sizes.window:
            edges += np.maximum(cached + 1 - window, 0) // self.page_size
        changed = (edges > self.published[rows]) | ~self.running[rows]
        changed &= self.resident[rows]  # a sequence to be computed anew may have left already
        self.published[rows] = edges
        return [
            (self.write_back(int(rows[index])), int(cached[index]))
            for index in changed.nonzero()[0].tolist()
        ]

    def _unrecorded(self, rows: np.ndarray) -> list[SaidTokens]:
        """Returns cached tokens that the workers were not told for looking up drafts."""
        said = []
        for row in rows[self.recorded[rows] < self.cached[rows]].tolist():
            start, stop = int(self.recorded[row]), int(self.cached[row])
            tokens = np.asarray(self.write_back(row).tokens[start:stop], "<i4")
            said.append(SaidTokens(row, start, tokens.tobytes()))
        return said

    def _upcoming(self, rows: np.ndarray, starts: np.ndarray) -> bytes:
        """Returns the tokens behind those of the step, as `StepPlan.upcoming`, for rows in the
        middle of their prompts. `starts` has the place of each row's first token behind the step.
        """
        if not self._sizes.modules:
            return b""
        found = np.full((len(rows), 1 + self._sizes.modules), -1, np.int32)
        found[:, 0] = rows
        for own, row, start in zip(found, rows.tolist(), starts.tolist(), strict=True):
            tokens = self.write_back(row).tokens[start : start + self._sizes.modules]
            own[1 : 1 + len(tokens)] = tokens
        return words(found)

    def _with_chunks(
        self, token_ids: np.ndarray, rows: np.ndarray, counts: np.ndarray, chunks: dict[int, int]
    ) -> np.ndarray:
        """Returns the tokens of all rows, with those of the prefill chunks inserted."""
        starts = np.cumsum(counts) - counts
        for row, count in chunks.items():
            start, cached = int(starts[np.searchsorted(rows, row)]), int(self.cached[row])
            tokens = self.write_back(row).tokens
            token_ids[start : start + count] = tokens[cached : cached + count]
        return token_ids

    def _options(
        self, rows: np.ndarray, counts: np.ndarray, samples: np.ndarray
    ) -> list[RowOptions]:
        options = []
        for index in self.options[rows].nonzero()[0].tolist():
            row = int(rows[index])
            one = self.sequences[row].options(
                row,
                length=int(self.length[row]),
                cached=int(self.cached[row]),
                count=int(counts[index]),
                fresh=bool(self.fresh[row]),
                samples=bool(samples[index]),
            )
            if one is not None:
                options.append(one)
        return options

    def _temperatures(self, rows: np.ndarray) -> bytes:
        sequences = self.sequences[rows]
        return words(np.asarray([one.request.params.temperature for one in sequences]), "<f4")

    def _new_pages(self, rows: np.ndarray, reach: np.ndarray, kv_lengths: np.ndarray) -> bytes:
        """Returns pages that the step reaches and the workers do not know, as `StepPlan.pages`.
        With rings, a page's ids in both tables lie side by side.

        Args:
          reach: cache entries that each row may have after the step.
          kv_lengths: those that it has at least, without its drafts.
        """
        needed = ends = -(-reach // self.page_size)
        if self._sizes.recurrent:
            ends = -(-(kv_lengths + self.slack[rows]) // self.page_size)
        told, rings = self.pages_told[rows], self.rings_told[rows]
        some = (needed > told) | (ends > rings)
        if not some.any():
            return b""
        # A state is only in the page of the last token that is certain.
        first = (kv_lengths - 1) // self.page_size * self._sizes.recurrent
        pages: list[tuple[int, int, int]] = []
        changed = np.stack([rows, told, needed, first, rings, ends], axis=1)[some].tolist()
        for row, start, end, opened, known, ring_end in changed:
            sequence, open_ring = self.sequences[row], self.open_ring[row // self.slots]
            tables = 1 + (open_ring is not None)
            page_ids = enumerate(sequence.page_ids[start:end], start)
            pages += [(row, place * tables, page) for place, page in page_ids]
            if open_ring is not None:
                open_ring(sequence, ring_end, opened)
                ring = sequence.ring
                if self._sizes.recurrent and not self._sizes.prefix_cache:  # one page for all
                    ring = dict.fromkeys(range(known, ring_end), *ring.values())
                pages += [(row, at * tables + 1, page) for at, page in ring.items() if at >= known]
        self.pages_told[rows] = np.maximum(needed, told)
        self.rings_told[rows] = np.maximum(ends, rings)
        return words(np.asarray(pages, np.int32).reshape(-1, 3).T)

    def complete(self, step: StepInFlight, accepted: np.ndarray | None = None) -> np.ndarray:
        """Counts a step as complete. Returns the rows (a mask) whose sequence keeps the sampled
        token.

        Args:
          accepted: number of right drafts in each row of the step; None: the step had none.
        """
        rows = step.rows
        self.in_flight[rows] -= 1
        self.pending[rows] -= step.samples
        if step.drafts is not None:
            assert accepted is not None
            self.slack[rows] -= step.drafts
            self.cached[rows] += accepted
            self.recorded[rows] += accepted
            self.length[rows] += accepted
        return step.samples & ~self.ended[rows]

    def take_back(self, step: StepInFlight) -> None:
        """Undoes the issue of a step that never ran. The newest step comes first.

        The workers will be told everything about its sequences again.
        """
        rows = step.rows
        self.in_flight[rows] -= 1
        self.pending[rows] -= step.samples
        self.length[rows] -= step.samples
        self.cached[rows] -= step.counts
        if step.drafts is not None:
            self.slack[rows] -= step.drafts
        self.recorded[rows] = 0
        self.proposed[rows] = False
        self.fresh[rows] = self.cached[rows] == self.found[rows]
        self.told[rows] = False
        self.pages_told[rows] = self.rings_told[rows] = 0

    def unfed(self, row: int) -> int:
        """Returns the tokens of the row's sequence that no step has fed yet, at least 1."""
        return int(self.length[row] - self.cached[row])

    @property
    def is_last(self) -> np.ndarray:
        """Returns the rows (a mask) whose sequence ends with the tokens that become known next."""
        return self.length - self.pending >= self.longest

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds a known token to each row's sequence."""
        counts = self.recent_count[rows]
        self.recent[rows, counts] = token_ids
        self.recent_count[rows] = counts + 1
        self.last_token[rows] = token_ids
        for row in rows[counts == RECENT_TOKENS - 1].tolist():
            self.write_back(row)

    def write_back(self, row: int) -> Sequence:
        """Brings the tokens of the row's sequence up to date; returns the sequence."""
        sequence: Sequence = self.sequences[row]
        if count := int(self.recent_count[row]):
            sequence.tokens.frombytes(self.recent[row, :count].tobytes())
            self.recent_count[row] = 0
        return sequence

    def known_cached(self, step: StepInFlight) -> np.ndarray:
        """Returns the cached tokens of each row of a complete step that the host knows."""
        # A sampled token has no entry before the next step feeds it. Entries of that step may be
        # written already, but for tokens that the host does not know.
        known = self.length[step.rows] - self.pending[step.rows]
        return np.where(step.samples, known - 1, np.minimum(step.kv_lengths, known))

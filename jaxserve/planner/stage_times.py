"""The duration of every stage of a step, for the batch that the scheduler planned.

Called by `simulate.py` and `deploy.py`. `Rooflines` computes times from a deployment and its
hardware, corrected by what was measured or counted from compiled programs. Times are without noise,
which `noise.py` adds.
"""

import functools
import math
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.planner.calibration import NOTHING
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import (
    BLOCK_TOKENS,
    FIRST_TOKENS,
    Attending,
    AttentionLayers,
    CostModel,
    Expanded,
    prompt_chunks,
    row_padding,
    tile_padding,
)
from jaxserve.planner.noise import ExpertLoads, Skew
from jaxserve.planner.stages import Calculator, StageTime


class Rows(NamedTuple):
    """The sequences of one step: NumPy arrays of the same length, an entry a sequence."""

    groups: int
    """DP groups of the domain."""
    group: np.ndarray
    tokens: np.ndarray
    """Tokens of this step."""
    length: np.ndarray
    """Tokens in the cache after it."""
    padded: int
    """Tokens of every DP group's message."""
    reach: int = 0
    """Tokens that the bucket's pages of a sequence can hold; 0: its actual tokens. Matters only on
    hardware without kernels (`Hardware.pads`)."""
    sampled: int = 0
    """Rows of a DP group that head and sampler process; 0: one per sequence. Matters likewise."""
    pairs: np.ndarray | None = None
    """Pairs of a token of the step with a token that it attends to, without a window; None: as
    tokens and lengths imply."""
    exchanged: int = 0
    """Tokens of the pages that every DP group sends to all others in each layer, where groups
    compute parts of one prompt (`scheduler.spread`)."""

    def sums(self, each: np.ndarray) -> np.ndarray:
        """Sums of a number of each sequence, an entry a DP group."""
        return np.bincount(self.group, each, self.groups)


def even_rows(
    groups: int, count: int, tokens: float, context: float, pairs: float = 0, **bucket: int
) -> Rows:
    """Rows of `count` equal sequences, spread evenly over the DP groups, with these tokens,
    contexts and pairs of all together (no pairs: as the others imply), in a `bucket` with `padded`,
    `reach` and `sampled` of `Rows`."""
    tokens_each, length = (np.full(count, total / count) for total in (tokens, context))
    attended = np.full(count, pairs / count) if pairs else None
    made = Rows(groups, np.arange(count) % groups, tokens_each, length, 0, pairs=attended)
    return made._replace(**bucket)  # type: ignore[arg-type]


def attending(group: AttentionLayers, tile: int, tp: int, rows: Rows, *, least: float) -> Attending:
    """Returns the work of a layer's attention, `tile` as in `tile_padding`, `least` as in
    `prompt_chunks`. Where rows have a `reach`, hardware has no kernels, and attends to whole
    blocks."""
    spec, window = group.spec, group.spec.window
    if rows.reach and not spec.state_numbers:
        longest = float(rows.length.max(initial=1))
        block = FIRST_TOKENS if longest <= BLOCK_TOKENS else BLOCK_TOKENS
        # Blocks of the page tables up to the end of the longest sequence.
        reach = min(rows.reach, window or math.ceil(longest / block) * block)
        tokens = np.full(rows.groups, float(rows.padded))
        return Attending(tokens, tokens * reach, tokens * reach)
    read, pairs, expanded = rows.length, rows.pairs, None
    if pairs is None:
        pairs = rows.tokens * np.maximum(rows.length - (rows.tokens - 1) / 2, 1.0)
    if spec.state_numbers:
        read, pairs = 2.0 * np.ones_like(rows.tokens), rows.tokens
    elif window:
        read = np.minimum(rows.length, window + rows.tokens - 1)
        pairs = np.minimum(pairs, rows.tokens * window)
    scored, sparse = (rows.sums(rows.length), rows.sums(pairs)), False
    if spec.every:
        others = rows.length // spec.every
        scored = rows.sums(others), rows.sums(rows.tokens * others)
        others = np.minimum(others, spec.indexer.top_k) if spec.indexer else others
        read, pairs = read + others, pairs + rows.tokens * others
    elif spec.indexer:
        sparse = bool((rows.length > spec.indexer.top_k).any())
        pairs = np.minimum(pairs, rows.tokens * spec.indexer.top_k)
        read = pairs if sparse else read  # every token's rows are copied by themselves
    if spec.expansion and (rows.tokens > 1).any() and not sparse:
        read, pairs, more = prompt_chunks(rows.tokens, rows.length, pairs, least=least)
        more = more._replace(pairs=more.pairs * row_padding(tile, rows.tokens))
        expanded = Expanded(*(rows.sums(each) for each in more))
    pairs = pairs * tile_padding(group, tile, tp, rows.tokens)
    return Attending(rows.sums(rows.tokens), rows.sums(read), rows.sums(pairs), expanded, scored)


def attend(
    made: Calculator,
    group: AttentionLayers,
    on: Hardware,
    tp: int,
    batch: int,
    tokens: int = 1,
    stage: Literal["attend", "enter"] = "attend",
) -> StageTime:
    """A layer's attention of `batch` sequences of a DP group, all of the calculator's context, with
    `tokens` each in the step, drafts included; its cache is read once. `enter` is the step's first,
    which embeds, too; rooflines do not tell them apart."""
    least = least_chunk(made, group, on)
    one = _of_one(group, on.tile_rows, tp, tokens, made.context, least)
    return StageTime(*made.attended(group, on, tp, one.of(batch), stage))


@functools.lru_cache(1024)
def _of_one(
    group: AttentionLayers, tile: int, tp: int, tokens: int, context: int, least: float
) -> Attending:
    one = Rows(1, np.zeros(1, int), np.array([tokens]), np.array([context]), tokens)
    return attending(group, tile, tp, one, least=least)


def least_chunk(made: Calculator, group: AttentionLayers, on: Hardware) -> float:
    """Returns the tokens of the shortest chunk that attends to expanded keys and values alone, as
    assumed, or as the engine does; 0: none does."""
    if made.assumed.expanded:
        return 2
    expansion = group.spec.expansion
    return 0 if expansion is None or on.platform == "tpu" else expansion.least


class StepTimes(NamedTuple):
    """Seconds of one lane's step. The first layer's attention includes the embedding."""

    attend: np.ndarray  # [layers, DP groups]
    dispatch: np.ndarray  # [layers]
    ffn: np.ndarray  # [layers]
    """In a colocated deployment only the work, without exchanges."""
    combine: np.ndarray  # [layers]
    leave: float
    """Head and sampling."""
    host: float = 0.0
    """Host time of the step; the host serves lanes in turn. 0: lanes do not wait for it."""
    waits: tuple[float, float] = (0.0, 0.0)
    """See `WAITS`; for whole steps alone."""


WAITS: dict[str, tuple[float, float]] = {"gpu": (0.0, 0.5), "tpu": (0.09, 0.09)}
"""Share of the exchanges in a program of whole steps with three lanes, beside which the attention
and the ffn role do not compute, by platform. Counted in Step-3's compiled programs: none of 6 and
3 of 6 for H200; 4 of 44 for v7x, 3 of 44 for v6e. CPUs compute beside none."""


class StageTimes(Protocol):
    """The source of stage times that a simulation uses."""

    @property
    def layers(self) -> int: ...

    def step(self, rows: Rows) -> StepTimes: ...


class Rooflines(msgspec.Struct, frozen=True):
    """Times of a layout on hardware. The roles' calculators may have formats of their own; their
    `context` is not looked at, as every sequence has its length. `experts` say how unevenly tokens
    fall on the ffn devices; None: `Assumptions.imbalance`."""

    layout: Layout
    attention: Calculator
    ffn: Calculator
    hardware: tuple[Hardware, Hardware]
    experts: ExpertLoads | None = None

    def __post_init__(self) -> None:
        if self.layout.dp != 1 and not self.layout.topology.splits_experts:
            raise ConfigError(f"attention.dp = {self.layout.dp} in colocated TP")

    @property
    def layers(self) -> int:
        return self.attention.model.layers

    def step(self, rows: Rows) -> StepTimes:
        made, layout, (on, on_ffn) = self.attention, self.layout, self.hardware
        kinds, groups, tp = made.model.order, made.model.attention, layout.tp
        seen = rows if on.pads else rows._replace(reach=0)
        loads = [
            attending(group, on.tile_rows, tp, seen, least=least_chunk(made, group, on))
            for group in groups
        ]
        of_kinds = zip(groups, loads, strict=True)
        attend = np.stack([made.attended(group, on, tp, load)[0] for group, load in of_kinds])
        if rows.exchanged:
            sent = rows.groups, rows.exchanged
            attend += np.array([[made.exchanged_pages(each, on, tp, *sent)] for each in groups])
        attend = attend[[a for a, _ in kinds]]
        if made.measured is not NOTHING:
            first = kinds[0][0]
            attend[0] = made.attended(groups[first], on, tp, loads[first], "enter")[0]
        tokens = rows.sums(rows.tokens)
        total, fullest = round(tokens.sum()), round(tokens.max())
        # Layers of a kind take as long as each other, but for their busiest rank.
        known: dict[tuple[int, float | None], list[float]] = {}
        exchanged = []
        for layer, (_, f) in enumerate(kinds):
            busiest = None if self.experts is None else self.experts.busiest(layer, total)
            key = f, busiest if self.ffn.model.ffn[f].experts else None
            if key not in known:
                known[key] = self._exchanged(*key, total, fullest, rows)
            exchanged.append(known[key])
        dispatch, ffn, combine = np.array(exchanged).T
        if layout.overlapped(made.assumed):
            dispatch, ffn, combine = _unhidden(attend, dispatch, ffn, combine)
        sampled = int(np.bincount(rows.group, minlength=rows.groups).max(initial=1))
        if on.pads:
            sampled = rows.sampled or sampled
        leave = made.head(on, sampled, tp)
        host = made.step_host(on) or self.layers * made.host(layout, on, on_ffn)
        waits = WAITS.get(on.platform, (1.0, 1.0))
        return StepTimes(attend, dispatch, ffn, combine, leave, host, waits)

    def _exchanged(
        self, f: int, busiest: float | None, tokens: int, fullest: int, rows: Rows
    ) -> list[float]:
        """Seconds of a layer's dispatch, ffn and combine. Where the exchange is among devices of
        attention, it waits for what the fullest DP group sends."""
        layout, sizes = self.layout, {"padded": rows.groups * rows.padded}
        if not layout.topology.has("ffn"):
            sizes["sent"] = rows.groups * fullest
        group, on = self.ffn.model.ffn[f], self.hardware
        made = self.ffn.exchanged(layout, on, group, tokens, rows.padded, busiest=busiest, **sizes)
        return [each.seconds for each in made]


def _unhidden(
    attend: np.ndarray, dispatch: np.ndarray, ffn: np.ndarray, combine: np.ndarray
) -> np.ndarray:
    """Dispatch, ffn and combine of all layers where another batch attends while this one's rows
    travel, as in DeepSeek's decoding: only what takes longer than attention is left of messages."""
    moving = np.maximum(dispatch + combine, 1e-30)
    left = np.maximum(0.0, 1 - attend.max(axis=1) / moving)
    return np.stack([left * dispatch, ffn, left * combine])


def expert_loads(
    layout: Layout, model: CostModel, skew: Skew | None, *, seed: int = 0, placed: bool = False
) -> ExpertLoads | None:
    """How tokens fall on the ffn devices of a layout; None: evenly, or on a single one. `placed` as
    in `ExpertLoads`."""
    moe = model.moe
    if skew is None or moe is None or layout.ep == 1:
        return None
    random = np.random.default_rng(seed)
    popularity = skew.popularity(random, model.layers, moe.experts)
    sizes = layout.slots(moe.experts)
    return ExpertLoads(random, popularity, sizes, top_k=moe.top_k, placed=placed)

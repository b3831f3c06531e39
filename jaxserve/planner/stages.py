"""How long the stages of a layer take, and what a device holds: rooflines of this engine's layouts.

Called by `search.py` and `stage_times.py`. Times are of one lane and one layer. A kernel takes as
long as its bytes or its FLOPs, whichever is longer, at the shares of the peak in `Assumptions`; a
stage has a constant on top. Nothing here knows of instances, prices or targets.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.link.width import row_words
from jaxserve.planner.calibration import NOTHING, Calibration
from jaxserve.planner.cost import attention_flops
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import AttentionLayers, CostModel, FFNLayers

Format = Literal["bfloat16", "fp8", "int8"]

SIZE: dict[str, int] = {"bfloat16": 2, "fp8": 1, "int8": 1}
SCALE = 4
"""Bytes of a scale."""


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """How numbers are stored, sent and multiplied."""

    weights: Format = "fp8"
    cache: Format = "fp8"
    dispatch: Format = "fp8"
    compute: Literal["auto", "bfloat16", "fp8", "int8"] = "auto"
    """Of matrix products. `auto`: as the engine does it, INT8 for INT8 weights and else BF16;
    attention then in BF16. Anything else: everything in this format, as in the paper's FP8."""

    @property
    def linear(self) -> str:
        """Format of products with weights."""
        if self.compute != "auto":
            return self.compute
        return "int8" if self.weights == "int8" else "bfloat16"

    @property
    def attention(self) -> str:
        """Format of attention's products."""
        return "bfloat16" if self.compute == "auto" else self.compute


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What separates rooflines from clocks.

    Compute, memory and stage_seconds are fitted to Step-3's table 9: its layers on H800, H20 and
    A800 come out within 17 %, the other models' on H800 within 16 % (on H20 they are off by 27 %
    to 57 %). The network's share is what §5.4 reports of DeepEP. The others are guesses.
    """

    compute: float = 0.7
    """Share of the peak FLOP/s."""
    memory: float = 0.9
    """Share of the peak memory bandwidth."""
    network: float = 0.8
    """Share of the peak of network and fast link."""
    stage_seconds: float = 50e-6
    """Launches, norms, routing, sorting: a constant of every attend and ffn stage."""
    crossing_seconds: float = 20e-6
    """Latency of a message from one role to the other."""
    collective_seconds: float = 10e-6
    """Latency of a collective within a role."""
    imbalance: float = 1.1
    """Tokens of the busiest device over the mean, where experts are whole. A guess."""
    overlap: float = 0.0
    """Share of the ffn role's collectives that its products hide. The engine's programs do one
    after the other; Step-3's kernels hide them (§7.1)."""
    broadcast: bool = False
    """Whether a row goes to every ffn host directly and attention sums their results (Step-3
    §7.1), or to one ffn device, and from there to the hosts that need it."""
    reserve: float = 0.1
    """Share of the memory for activations and the compiler."""


class Stage(NamedTuple):
    """A stage's time and what most of it goes to."""

    seconds: float
    bound: str
    """`memory`, `compute`, `network` or `overhead`."""


class FFNStage(NamedTuple):
    """An ffn stage in its parts."""

    spread: float
    """Seconds in which rows get to all ffn devices that need them."""
    work: Stage
    gather: float
    """Seconds in which partial results are summed."""

    def stage(self, overlap: float) -> Stage:
        """All of it, with this share of the moving hidden by the work, as far as it can be."""
        moving = self.spread + self.gather
        hidden = overlap * min(moving, self.work.seconds)
        bound = "network" if moving > self.work.seconds else self.work.bound
        return Stage(moving + self.work.seconds - hidden, bound)


class Calculator(NamedTuple):
    """Everything that does not change in a search."""

    model: CostModel
    context: int
    """Mean tokens of a running sequence."""
    formats: Formats
    assumed: Assumptions
    measured: Calibration = NOTHING
    """What was measured of the stages, which corrects the rooflines."""

    def _work(self, hardware: Hardware, kernels: Sequence[tuple[float, float, str]]) -> Stage:
        """Kernels of (bytes, FLOPs, format), one after the other, and the stage's constant."""
        parts = {"overhead": self.assumed.stage_seconds, "memory": 0.0, "compute": 0.0}
        for size, flops, number_format in kernels:
            reading = size / hardware.bandwidth / self.assumed.memory
            computing = flops / hardware.flops(number_format) / self.assumed.compute
            parts["memory" if reading >= computing else "compute"] += max(reading, computing)
        return Stage(sum(parts.values()), max(parts, key=parts.__getitem__))

    def attend(self, group: AttentionLayers, hardware: Hardware, batch: int, tp: int) -> Stage:
        """A layer's attention: `batch` sequences of a DP group over `tp` devices."""
        seen = self._cached_tokens(group)
        read = batch * (2 if group.kind == "lightning" else seen)  # a state is read and written
        stage = self._work(hardware, self._attend_kernels(group, tp, batch, read, batch * seen))
        seconds, bound = stage
        if tp > 1:
            moving = self._sum_over(hardware, tp, batch)
            seconds, bound = seconds + moving, "network" if moving > seconds else bound
        return Stage(self.measured.correct("attend", hardware.name, seconds), bound)

    def attend_seconds(
        self,
        group: AttentionLayers,
        hardware: Hardware,
        tp: int,
        tokens: Any,
        read: Any,
        pairs: Any,
    ) -> Any:
        """`attend` of many DP groups with batches of their own.

        Args:
          tokens: NumPy array, one entry a DP group: rows of the batch.
          read: cached tokens that are read; of lightning attention, states read and written.
          pairs: a query's token with a token that it attends to, all of them.
        """
        seconds = self.assumed.stage_seconds
        for size, flops, number_format in self._attend_kernels(group, tp, tokens, read, pairs):
            reading = size / hardware.bandwidth / self.assumed.memory
            computing = flops / hardware.flops(number_format) / self.assumed.compute
            seconds = seconds + np.maximum(reading, computing)
        if tp > 1:
            seconds = seconds + self._sum_over(hardware, tp, tokens)
        return self.measured.correct("attend", hardware.name, seconds)

    def _attend_kernels(
        self, group: AttentionLayers, tp: int, tokens: Any, read: Any, pairs: Any
    ) -> list[tuple[Any, Any, str]]:
        """Attention and the linear maps, as (bytes, FLOPs, format); `tokens` and so on are numbers
        or arrays."""
        split, whole = group.split_parameters(self.model.d_model)
        flops = attention_flops(group, 1) / tp
        return [
            (self.cache_row(group, tp) * read, flops * pairs, self.formats.attention),
            (
                self._linear_bytes(group, tp),
                2 * tokens * (split / tp + whole),
                self.formats.linear,
            ),
        ]

    def _sum_over(self, hardware: Hardware, tp: int, tokens: Any) -> Any:
        """Seconds to sum the output's rows over the devices of a DP group."""
        rows = 2 * (tp - 1) / tp * tokens * self.model.d_model * 2
        return self.assumed.collective_seconds + self._over(rows, hardware.link)

    def cross(
        self, bandwidths: tuple[float, float], sent: float, received: float, row_bytes: float
    ) -> Stage:
        """A message between the roles.

        Args:
          bandwidths: bytes/s of a sending and of a receiving device.
          sent: rows of a sending device; received: rows of a receiving one.
        """
        moving = max(
            self._over(rows * row_bytes, bandwidth)
            for rows, bandwidth in zip((sent, received), bandwidths, strict=True)
        )
        latency = self.assumed.crossing_seconds
        return Stage(latency + moving, "network" if moving > latency else "overhead")

    def ffn(
        self,
        group: FFNLayers,
        hardware: Hardware,
        tokens: int,
        ep: int,
        tp: int,
        busiest: float | None = None,
    ) -> FFNStage:
        """A layer's FFN over `ep` × `tp` devices; the dense part is cut over all of them.

        Args:
          busiest: tokens of the busiest device over the mean; None: `Assumptions.imbalance`.
        """
        d_model, devices = self.model.d_model, ep * tp
        size = SIZE[self.formats.weights]
        read, flops = 0.0, 0.0
        if group.experts:
            held = -(-group.experts // ep)
            met = held * (1 - (1 - group.top_k / group.experts) ** tokens)
            expert = 3 * d_model * group.expert_d_ff / tp
            if busiest is None:
                busiest = self.assumed.imbalance if ep > 1 else 1.0
            rows = busiest * tokens * group.top_k * held / group.experts
            read += met * expert * size
            flops += 2 * rows * expert
        shared = 3 * d_model * group.shared_d_ff / devices
        read += shared * size
        flops += 2 * tokens * shared
        work = self._work(hardware, [(read, flops, self.formats.linear)])
        work = Stage(self.measured.correct("ffn", hardware.name, work.seconds), work.bound)
        there, back = self._collectives(group, hardware, tokens, ep, tp)
        return FFNStage(there, work, back)

    def _collectives(
        self, group: FFNLayers, hardware: Hardware, tokens: int, ep: int, tp: int
    ) -> tuple[float, float]:
        """Seconds to spread rows over the ffn devices, and to sum results; rows cross from host to
        host once, and are spread by the fast link there."""
        devices = ep * tp
        if devices == 1:
            return 0.0, 0.0
        island = min(devices, hardware.link_devices)
        islands = -(-devices // island)
        everywhere = bool(group.shared_d_ff) or not group.experts
        to_device = 1.0 if everywhere else meets(group, ep)
        to_island = 1.0 if everywhere else meets(group, islands)
        inner = tokens * to_device * (island - 1) / island
        outer = tokens * to_island * (islands - 1) / islands / island
        if self.assumed.broadcast:
            outer = 0.0
        width = self.model.d_model
        seconds = []
        for row_bytes in (width * SIZE[self.formats.dispatch], width * 2):
            seconds.append(
                self.assumed.collective_seconds
                + self._over(inner * row_bytes, hardware.link)
                + self._over(outer * row_bytes, hardware.network)
            )
        return seconds[0], seconds[1]

    def head(self, hardware: Hardware, batch: int, tp: int) -> float:
        """Seconds of embedding, head and sampling, once a step and lane."""
        parameters = self.model.vocab * self.model.d_model / tp
        return self._work(hardware, [(2 * parameters, 2 * batch * parameters, "bfloat16")]).seconds

    def dispatch_bytes(self) -> int:
        """Bytes of a row on its way to the ffn role, as the engine packs it."""
        moe, size = self.model.moe, SIZE[self.formats.dispatch]
        top_k = moe.top_k if moe else 0
        return row_words(self.model.d_model, top_k, size, has_scale=size == 1) * size

    def combine_bytes(self) -> int:
        """Bytes of a row on its way back."""
        return self.model.d_model * 2

    def cache_row(self, group: AttentionLayers, tp: int) -> float:
        """Bytes a token, layer and device; of lightning attention, of the whole state."""
        size = group.cache_bytes or SIZE[self.formats.cache]
        if group.kind == "lightning":
            return size * group.q_heads * group.head_dim**2 / tp
        heads = max(1.0, group.kv_heads / tp)
        scale = 0 if group.cache_bytes or self.formats.cache == "bfloat16" else SCALE
        return (1 if group.kind == "mla" else 2) * heads * (group.head_dim * size + scale)

    def _cached_tokens(self, group: AttentionLayers) -> int:
        if group.kind == "lightning":
            return 1
        return min(self.context, group.window) if group.window else self.context

    def sequence_bytes(self, tp: int) -> float:
        """Bytes of cache that one sequence takes on a device of its DP group."""
        return sum(
            group.layers * self.cache_row(group, tp) * self._cached_tokens(group)
            for group in self.model.attention
        )

    def attention_weights(self, tp: int) -> float:
        """Bytes of weights on an attention device, embedding and head in BF16."""
        maps = sum(group.layers * self._linear_bytes(group, tp) for group in self.model.attention)
        routers = sum(group.layers * group.experts for group in self.model.ffn)
        tables = 2 * self.model.vocab / tp
        return maps + 2 * self.model.d_model * (routers + tables)

    def _linear_bytes(self, group: AttentionLayers, tp: int) -> float:
        """Bytes of a layer's linear maps on a device. The engine keeps the per-head maps of latent
        attention in BF16."""
        split, whole = group.split_parameters(self.model.d_model)
        size = SIZE[self.formats.weights]
        total = (split / tp + whole) * size
        if group.kind == "mla":
            per_head = group.kv_latent * group.q_heads * (group.nope_dim + group.v_dim)
            total += per_head / tp * (2 - size)
        return total

    def ffn_weights(self, ep: int, tp: int) -> float:
        """Bytes of weights on an ffn device."""
        total = 0.0
        for group in self.model.ffn:
            experts = -(-group.experts // ep) * group.expert_d_ff / tp
            width = experts + group.shared_d_ff / (ep * tp)
            total += group.layers * 3 * self.model.d_model * width
        return total * SIZE[self.formats.weights]

    def _over(self, size: Any, bandwidth: float) -> Any:
        return size / bandwidth / self.assumed.network


def meets(group: FFNLayers, parts: int) -> float:
    """Probability that a token goes to a given one of `parts` equal parts of the experts:
    1 − C(E − E/parts, k) / C(E, k)."""
    elsewhere = group.experts - group.experts / parts
    misses = 1.0
    for index in range(group.top_k):
        misses *= max(0.0, elsewhere - index) / (group.experts - index)
    return 1 - misses

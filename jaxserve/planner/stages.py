"""Rooflines of this engine's layouts: times of a layer's stages, and bytes of weights and cache.

Times are of one lane and one layer: the time of a kernel's bytes or of its FLOPs, whichever is
longer, at the shares of the peak in `Assumptions`, and a constant for the stage. Measurements
correct rooflines.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxserve.config.formats import scaled
from jaxserve.config.model import Platform, platform_of
from jaxserve.model.ffn.traffic import ExchangeKind, ExchangeMesh, choose, ranks_met, reach
from jaxserve.model.row_width import RowBytes, row_bytes
from jaxserve.planner.assumptions import Assumptions, Formats, number_bytes
from jaxserve.planner.calibration import NOTHING, Calibration, FitKey, MeasuredStage, Terms
from jaxserve.planner.hardware import (
    Hardware,
    alltoall_seconds,
    gather_seconds,
)
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import (
    BLOCK_ROWS,
    Attending,
    AttentionLayers,
    CostModel,
    Declared,
    FFNLayers,
    blocks_met,
    busiest_by_chance,
)

_row_bytes = functools.lru_cache(256)(row_bytes)


class StageTime(NamedTuple):
    """The time of a stage, and its largest component."""

    seconds: float
    bound: str
    """`memory`, `compute`, `network` or `overhead`."""


class FFNStage(NamedTuple):
    """Seconds to bring rows to the ffn devices, work, and seconds to sum partial results."""

    spread: float
    work: StageTime
    gather: float

    def stage(self, overlap: float) -> StageTime:
        """Returns the whole stage; `overlap` of the shorter of work and moving is hidden."""
        moving = self.spread + self.gather
        hidden = overlap * min(moving, self.work.seconds)
        bound = "network" if moving > self.work.seconds else self.work.bound
        return StageTime(moving + self.work.seconds - hidden, bound)


class Calculator(NamedTuple):
    """Computes stage times and memory; holds what is constant during a search."""

    model: CostModel
    context: int
    """Mean tokens of a running sequence."""
    formats: Formats
    assumed: Assumptions
    measured: Calibration = NOTHING
    """Measurements of the stages, which correct the rooflines."""
    exchange: Literal["auto", "gather", "alltoall"] = "auto"
    """`ffn.exchange` of the deployment."""

    def _work(self, hardware: Hardware, kernels: Sequence[tuple[Any, Any, str]]) -> tuple[Any, str]:
        """Seconds and bound of kernels of (bytes, FLOPs, format), one after the other, with the
        stage's constant. Seconds are an array, without a bound, where bytes are."""
        constant = self.assumed.stage_seconds
        parts: dict[str, Any] = {"overhead": constant, "memory": 0.0, "compute": 0.0}
        several = isinstance(kernels[0][0], np.ndarray)
        for size, flops, number_format in kernels:
            reading = size / hardware.bandwidth / self.assumed.memory
            computing = flops / hardware.flops(number_format) / self.assumed.compute
            if several:
                parts["memory"] = parts["memory"] + np.maximum(reading, computing)
            else:
                parts["memory" if reading >= computing else "compute"] += max(reading, computing)
        bound = "" if several else max(parts, key=parts.__getitem__)
        return sum(parts.values()), bound

    def attended(
        self,
        group: AttentionLayers,
        hardware: Hardware,
        tp: int,
        load: Attending,
        stage: Literal["attend", "enter"] = "attend",
    ) -> tuple[Any, str]:
        """Seconds and bound of a layer's attention, and of what its devices send each other.
        Seconds are an array, without a bound, for many DP groups with loads of their own."""
        kernels = self._attend_kernels(group, hardware, tp, load)
        seconds, bound = self._work(hardware, kernels)
        layers, fixed = _place(self.model.attention, group), kernels[1][0]
        seconds = self._corrected(stage, hardware, layers, kernels, fixed, seconds)
        moving: Any = 0.0
        if tp > 1:
            row = 2 * (tp - 1) / tp * self.model.d_model * number_bytes(self.formats.rows)
            summed = load.tokens * row / hardware.gather_bandwidth(tp) / self.assumed.network
            moving = self.latency(hardware, tp) + summed
        if (groups := self.formats.output) > 1:  # heads go to the parts, FP32 sums come back
            columns = self._declared(group, tp, platform_of(hardware.platform)).sent_columns
            row = columns * number_bytes(self.formats.rows)
            row += 4 * self.model.d_model * (1 - 1 / groups)
            devices, width = groups * tp, hardware.network
            if devices <= hardware.link_devices:
                width = hardware.alltoall_bandwidth(devices)
            passing = load.tokens * row / width / self.assumed.network
            moving = moving + 2 * self.latency(hardware, devices) + passing
        bound = "network" if bound and moving > seconds else bound
        return seconds + moving, bound

    def exchanged_pages(
        self, group: AttentionLayers, hardware: Hardware, tp: int, groups: int, tokens: int
    ) -> float:
        """Seconds in which DP groups exchange the cached rows of `tokens` tokens of each in a
        layer, and write what they gathered (`model/attention/exchanged_pages.py`)."""
        size = self.cache_row(group, tp, platform_of(hardware.platform))
        row, mesh = RowBytes(math.ceil(size), 0), ExchangeMesh(groups, tp, None)
        gathered, _ = gather_seconds(hardware, mesh, row, brought=False)
        written = 2 * groups * size / hardware.bandwidth / self.assumed.memory
        moving = tokens * (gathered / self.assumed.network + written)
        return self.latency(hardware, groups * tp) + moving

    def _corrected(
        self,
        stage: MeasuredStage,
        hardware: Hardware,
        layers: int,
        kernels: Sequence[tuple[Any, Any, str]],
        fixed: float,
        roof: Any,
    ) -> Any:
        """Returns the seconds of a stage of these kernels, as measured of such stages; else the
        roofline's. `fixed` bytes are read whatever the load."""
        if self.measured is NOTHING:
            return roof
        size = sum(size for size, _, _ in kernels) - fixed
        terms = Terms(
            size / hardware.bandwidth,
            sum(flops / hardware.flops(number_format) for _, flops, number_format in kernels),
            fixed / hardware.bandwidth,
        )
        return self.measured.seconds(self._key(stage, hardware, layers), terms, roof)

    def _key(self, stage: MeasuredStage, hardware: Hardware, layers: int = 0) -> FitKey:
        form = self.formats.of(stage)
        return FitKey(stage, hardware.name, self.model.name, form, layers)

    def _attend_kernels(
        self, group: AttentionLayers, hardware: Hardware, tp: int, load: Attending
    ) -> list[tuple[Any, Any, str]]:
        """Costs of attention and of the linear maps as (bytes, FLOPs, format), from numbers or
        arrays. FLOPs of INT8 products are divided by the speed-up of their kernel."""
        own = self._declared(group, tp, platform_of(hardware.platform))
        flops, form = group.spec.pair_flops / tp, self.formats.attention
        if group.int8_products:
            flops /= hardware.int8_attention
        kernels = [
            (own.row_bytes * load.read, flops * load.pairs, form),
            (own.weight_bytes, 2 * load.tokens * own.parameters, self.formats.linear),
        ]
        if scorer := group.spec.own_indexer:
            keys, pairs = load.scored
            # A score of one token for another (DeepSeek-V3.2, equation 1).
            flops = 2.0 * scorer.heads * scorer.head_dim * pairs
            kernels.append((own.key_bytes * keys, flops, form))
        if load.expanded is not None and (expansion := group.spec.expansion):
            # Keys and values of all heads are expanded and written, then read and attended to.
            width = expansion.width / tp
            size = width * number_bytes(self.formats.rows) * load.expanded.tokens
            maps = 2 * expansion.products / tp * load.expanded.again
            kernels += [(size, maps, form), (size, 2 * width * load.expanded.pairs, form)]
        return kernels

    def latency(self, hardware: Hardware, devices: int) -> float:
        """Seconds of a collective over `devices` devices that moves no bytes."""
        return self.assumed.collective_seconds + self.assumed.hop_seconds * hardware.hops(devices)

    def step_host(self, hardware: Hardware) -> float:
        """Seconds of the attention role's host for a step and lane, as measured where lanes waited
        for it; else 0."""
        return float(self.measured.seconds(self._key("host", hardware), Terms(0.0, 0.0), 0.0))

    def host(self, layout: Layout, attention: Hardware, ffn: Hardware) -> float:
        """Host seconds of the busiest process a layer and lane; 0 where one call runs all."""
        if layout.whole_steps or layout.topology.has("colocated"):
            return 0.0
        devices = layout.attention_devices, layout.ffn_devices
        return self.assumed.host((attention, ffn), devices, self.model.layers)

    def crossings(
        self, layout: Layout, attention: Hardware, ffn: Hardware, batch: int
    ) -> tuple[StageTime, StageTime]:
        """Dispatch and combine of `batch` rows of a DP group: by the fast link if it joins the
        roles; over `pull`, through a process a host of either role; else over the network."""
        pulled = layout.topology.crosses_runtimes and self.assumed.pull_gb_s > 0
        joined = layout.attention == layout.ffn and layout.devices <= attention.link_devices
        bandwidth = [attention.link, ffn.link] if joined else [attention.network, ffn.network]
        copies = 1.0
        if self.assumed.broadcast:
            copies = -(-layout.ffn_devices // ffn.link_devices)
        sent = layout.instances * batch / layout.tp
        received = layout.dp * batch * self.own_rows(layout.ffn_mesh)
        rows = [copies * sent, copies * received]
        if pulled:
            processes = min(
                math.ceil(layout.attention_devices / attention.devices_per_host),
                math.ceil(layout.ffn_devices / ffn.devices_per_host),
            )
            pulling = self.assumed.pull_gb_s * 1e9 * processes
            bandwidth = [pulling, ffn.network * layout.ffn_devices]
            rows = [float(layout.dp * batch)] * 2
        elif joined:  # on a torus the roles are two parts of a slice, with few links between them
            bandwidth.append(attention.middle_bandwidth(layout.devices))
            rows.append(copies * layout.instances * layout.dp * batch)
        slowest = max(passing / width for passing, width in zip(rows, bandwidth, strict=True))
        assumed = self.assumed
        # `pull` was measured whole; other links have the peak of their hardware.
        latency, share = assumed.crossing_seconds, assumed.network
        if layout.whole_steps:
            latency = assumed.collective_seconds
        if pulled:
            latency, share = assumed.pull_seconds, 1.0

        def cross(stage: Literal["dispatch", "combine"], sender: Hardware, size: int) -> StageTime:
            moving = slowest * size
            charged, key = moving / share, self._key(stage, sender)
            seconds = self.measured.seconds(key, Terms(moving, 0.0), latency + charged)
            return StageTime(seconds, "network" if charged > latency else "overhead")

        sizes = self.dispatch_bytes(), self.combine_bytes()
        return cross("dispatch", attention, sizes[0]), cross("combine", ffn, sizes[1])

    def ffn(
        self,
        group: FFNLayers,
        hardware: Hardware,
        tokens: int,
        mesh: ExchangeMesh,
        busiest: float | None = None,
        redundant: int = 0,
        padded: int = 0,
        sent: int = 0,
    ) -> FFNStage:
        """A layer's FFN. The dense part is cut over all devices; with the all-to-all, the shared
        expert only over those of a rank, for the rank's own rows, or over none (`mesh.whole`). With
        ranks of its own, the stage takes as long as the slower kind of rank.

        Args:
          busiest: tokens of the busiest routed rank over the mean; None: `Assumptions.imbalance`.
          redundant: slots of a rank beyond its share of the experts, with replicas.
          padded: rows that products of all rows see; 0: `tokens`.
          sent: rows of all DP groups if each had as many as the fullest, for which an exchange
            waits; 0: `tokens`.
        """
        d_model, size = self.model.d_model, self.formats.weight_bytes
        if self._is_whole(group, mesh):
            tokens, mesh, sent = -(-tokens // mesh.ranks), mesh._replace(ranks=1), 0
        apart = group.experts and mesh.shared
        ep, tp = mesh.routed if apart else mesh.ranks, mesh.tensor
        linear, products = self.formats.linear, self.formats.experts(hardware)
        read, flops = 0.0, 0.0
        if group.experts:
            held = -(-group.experts // ep)
            met = (held + redundant) * (1 - (1 - group.top_k / group.experts) ** tokens)
            expert = 3 * d_model * group.expert_d_ff / tp
            rows = tokens * group.top_k / ep
            busiest = self._imbalance(group, ep, rows) if busiest is None else busiest
            rows *= busiest
            if hardware.pads and scaled(self.formats.weights):
                # A block of rows of one expert at a time.
                met = held * blocks_met(tokens, group.top_k / group.experts)
                rows = met * BLOCK_ROWS
            read += met * expert * size
            flops += 2 * rows * expert
        padded = (padded or tokens) if hardware.pads else tokens
        parts, seen = ep * tp, float(padded)
        if apart:
            parts, seen = tp, tokens / mesh.shared
        elif group.experts and mesh.whole:
            parts, seen = mesh.instances if mesh.split else tp, tokens * self.own_rows(mesh)
        elif self.exchange_kind(group, mesh, hardware) == "alltoall":
            parts = tp * mesh.instances
            seen = tokens * self.own_rows(mesh) * (tp if mesh.split else 1)
        shared = 3 * d_model * group.shared_d_ff / parts
        beside = shared * size, 2 * seen * shared, linear
        kernels = [(read, flops, products), beside]
        if apart:
            seconds, bound = max(self._work(hardware, [kernel]) for kernel in kernels)
        else:
            slower = hardware.flops(linear) / hardware.flops(products)
            both = read + beside[0], flops * slower + beside[1], linear
            seconds, bound = self._work(hardware, [both])
        layers = _place(self.model.ffn, group)
        seconds = self._corrected("ffn", hardware, layers, kernels, beside[0], seconds)
        there, back = self._collectives(group, hardware, sent or tokens, mesh, busiest or 1.0)
        return FFNStage(there, StageTime(seconds, bound), back)

    def exchanged(
        self,
        layout: Layout,
        on: tuple[Hardware, Hardware],
        group: FFNLayers,
        tokens: int,
        rows: int,
        *,
        busiest: float | None,
        **sizes: int,
    ) -> tuple[StageTime, StageTime, StageTime]:
        """Dispatch, ffn and combine of a layer, on hardware of attention and of the FFN, with
        `rows` of a DP group's message; other arguments as in `ffn`. In a colocated layout ffn is
        the work alone."""
        mesh, redundant = layout.ffn_mesh, layout.redundant_slots
        parts = self.ffn(group, on[1], tokens, mesh, busiest, redundant, **sizes)
        if layout.topology.has("ffn"):
            there, back = self.crossings(layout, *on, rows)
            return there, parts.stage(self.assumed.overlap), back
        return StageTime(parts.spread, "network"), parts.work, StageTime(parts.gather, "network")

    def _imbalance(self, group: FFNLayers, ranks: int, rows: float) -> float:
        """Rows of the busiest rank over the mean of `rows`, if all experts are alike: its share of
        the experts, and chance or what is assumed."""
        if ranks == 1:
            return 1.0
        held = -(-group.experts // ranks) * ranks / group.experts
        return (1.0 if self.assumed.replicas else held) * (
            self.assumed.imbalance or busiest_by_chance(ranks, rows)
        )

    def _is_whole(self, group: FFNLayers, mesh: ExchangeMesh) -> bool:
        """Whether such a layer is whole on every DP group (`Assumptions.whole_dense`)."""
        return self.assumed.whole_dense and not group.experts and mesh.attention is None

    def exchange_kind(
        self, group: FFNLayers, mesh: ExchangeMesh, hardware: Hardware
    ) -> ExchangeKind:
        """Returns how the rows of such a layer are exchanged, as the engine decides it."""
        if not group.experts or mesh.ranks == 1 or self._broadcast(mesh):
            return "gather"
        if self.exchange != "auto":
            return self.exchange
        reached = ranks_met(mesh, group.experts, group.top_k) / mesh.ranks
        gpus = hardware.platform == "gpu" and not self.assumed.alltoall
        platform: Platform = "gpu" if gpus else "tpu"
        row = self._row_bytes(group.top_k)
        return choose(mesh, row, reached, group.shared_d_ff > 0, platform)

    def own_rows(self, mesh: ExchangeMesh) -> float:
        """The part of all rows that the ffn devices that have most get from the link."""
        return 1 / mesh.peers if self._broadcast(mesh) else mesh.own

    def _broadcast(self, mesh: ExchangeMesh) -> bool:
        """Whether AFD's link brings every row to every island of the ffn devices."""
        return self.assumed.broadcast and mesh.split

    def _row_bytes(self, top_k: int) -> RowBytes:
        form = self.formats
        return _row_bytes(self.model.d_model, top_k, form.dispatch, form.rows, form.combine)

    def _collectives(
        self,
        group: FFNLayers,
        hardware: Hardware,
        tokens: int,
        mesh: ExchangeMesh,
        busiest: float = 1.0,
    ) -> tuple[float, float]:
        """Seconds until all devices have the rows that they need, and results are back. An
        all-to-all ends when the busiest rank has its rows, and when it has sent its results."""
        devices = mesh.ranks * mesh.tensor
        if devices == 1:
            return 0.0, 0.0
        own, row = tokens * self.own_rows(mesh), self._row_bytes(group.top_k)
        latency, ahead = self.latency(hardware, devices), 1
        if self.exchange_kind(group, mesh, hardware) == "alltoall":
            reached = reach(group.experts, group.top_k, mesh.routed)
            if mesh.shared:  # whichever kind of rank gets more
                reached = max(reached, 1 / mesh.shared)
            shared = group.shared_d_ff > 0
            moving = alltoall_seconds(hardware, mesh, row, reached, shared=shared)
            own, ahead = own * busiest, 2  # the numbers of rows go ahead
        else:
            moving = gather_seconds(hardware, mesh, row, brought=self._broadcast(mesh))
        there, back = (own * seconds / self.assumed.network for seconds in moving)
        return there + ahead * latency if there else 0.0, back + latency

    def entrance(self, hardware: Hardware, rows: int) -> float:
        """Seconds of a prediction module's input map, of `[embedding, hidden]`, on every device."""
        numbers, form = 2.0 * self.model.d_model**2, self.formats.rows
        work = [(numbers * number_bytes(form), 2 * rows * numbers, form)]
        return float(self._work(hardware, work)[0] - self.assumed.stage_seconds)

    def head(self, hardware: Hardware, batch: int, tp: int) -> float:
        """Seconds of embedding, head and sampling of `batch` rows, once a step and lane."""
        parameters = self.model.vocab * self.model.d_model / tp
        rows = self.formats.rows
        kernels = [(number_bytes(self.formats.table) * parameters, 2 * batch * parameters, rows)]
        roof, _ = self._work(hardware, kernels)
        return float(self._corrected("leave", hardware, 0, kernels, kernels[0][0], roof))

    def dispatch_bytes(self) -> int:
        """Bytes of a row on its way to the ffn role, as the engine packs it."""
        return self._row_bytes(self.model.moe.top_k if self.model.moe else 0).packed

    def combine_bytes(self) -> int:
        """Bytes of a row on its way back."""
        return self._row_bytes(0).result

    def cache_row(self, group: AttentionLayers, tp: int, platform: Platform = "gpu") -> float:
        """Bytes of a token in one layer on a device; of lightning attention, of the whole state."""
        own = self._declared(group, tp, platform)
        return own.row_bytes + own.key_bytes

    def _declared(self, group: AttentionLayers, tp: int, platform: Platform = "gpu") -> Declared:
        return self.model.declared(group.spec, self.formats, tp, platform)

    @property
    def handed_over(self) -> float:
        """Bytes of a token's entries in all layers that a hand-off of KV pages moves."""
        return sum(
            group.layers * self.cache_row(group, 1) * group.spec.rows_a_token
            for group in self.model.attention
        )


def _place[Layers](groups: Sequence[Layers], group: Layers) -> int:
    """Where equal layers are among the model's; a prediction module counts as the first."""
    return groups.index(group) if group in groups else 0

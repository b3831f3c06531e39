"""Brings rows to the devices that hold their experts, and results back to the rows' devices.

Called by the programs of the ffn role and of colocated mode, inside their `shard_map`. Every device
brings the same number of packed rows, some of which may be padding (ids past the last expert), and
gets their finished results. A table says which slots hold an expert (`replicas.py`). Dropless:
receive buffers have room for the worst routing. Knows mesh axes and blocks; neither how rows came
to the mesh nor how they are packed.
"""

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt

from jaxserve.config.formats import FormatName, scaled
from jaxserve.config.model import FFNKind
from jaxserve.model.ffn import collectives
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.beside import NOTHING, Beside, shared_expert
from jaxserve.model.ffn.replicas import choose_shared_rank, choose_slots, expert_load, work_of_rank
from jaxserve.model.ffn.traffic import ExchangeKind
from jaxserve.model.message import DispatchMessage
from jaxserve.model.row_width import result_words
from pallas_kernels.grouped_matmul.packed_sums import Sums, Unsummed
from pallas_kernels.grouped_matmul.routed import Choices, Order, sort_choices
from pallas_kernels.target import current_target

if TYPE_CHECKING:
    from jaxserve.model.ffn.block import FFNBlock


class RowPacking(Protocol):
    """The packing of rows (`link.dispatch.message.PackedRows`)."""

    def unpack(self, packed: UInt[Array, "rows words"]) -> DispatchMessage:
        """Unpacks rows."""

    def addressed(
        self, packed: UInt[Array, "rows words"], slots: Int32[Array, "rows top_k"]
    ) -> UInt[Array, "rows words"]:
        """Replaces the expert ids of packed rows."""


class RowBlocks(NamedTuple):
    """Equal blocks of the rows of all devices, device after device."""

    total: int = 1
    filled: tuple[int, ...] = (0,)
    """Blocks that hold rows; the others hold padding, which is neither computed nor sent on."""

    @property
    def all_filled(self) -> bool:
        """Returns whether no block is padding."""
        return len(self.filled) == self.total


class Results(NamedTuple):
    """The form in which results travel that are not yet summed over devices."""

    dtype: jnp.dtype
    """The model's dtype, for results that are added up on the way."""
    int8: bool = False
    """Whether all other results travel in INT8, with a scale a row."""

    def summed_rows(
        self, shares: Unsummed, axes: tuple[str, ...], beside: Beside = NOTHING
    ) -> Sums:
        """See `collectives`."""
        if self.int8:
            return collectives.summed_int8_rows(shares, axes, beside)
        add_up = functools.partial(collectives.summed_rows, axes=axes, dtype=self.dtype)
        return Unsummed(beside.during(shares.total(self.dtype), add_up, last=True))

    def over_tensor(self, rows: Sums, axes: Axes) -> Sums:
        """Sums over the devices of a rank if they have the same rows."""
        if axes.split:
            return rows
        return Unsummed(collectives.summed(rows.total(), axes.tensor, self.dtype))

    def pack(self, results: Unsummed) -> Array:
        """Packs rows for their way back. Rows without results do not travel and may be anything."""
        if self.int8:
            return results.packed(result_words(results.shape[1]), everywhere=False)
        return results.total(self.dtype)


Computed = tuple[Sums, Int32[Array, " experts"] | None]
"""A layer's output for a device's own rows; and how many rows of all devices each routed expert got
on this device, None in a layer without routed experts."""
Stages = Generator[Any, Any, Computed]
"""An exchange that stops when rows have arrived, and before results return. It yields these, and is
sent the same ones, perhaps behind a barrier. See `ended`."""


def ended[T](stages: Generator[Any, Any, T], arrays: Any = None) -> T:
    """Runs an exchange, or the rest of one, and returns its result.

    Args:
      arrays: what it is sent first; None: it has not begun.
    """
    try:
        while True:
            arrays = stages.send(arrays)
    except StopIteration as end:
        return end.value


class GatherExchange(NamedTuple):
    """All rows go to all devices, whose shares of the results are summed: an all-gather, and a
    reduce-scatter back."""

    axes: Axes
    blocks: RowBlocks
    results: Results

    def stages(
        self,
        packed: UInt[Array, "rows words"],
        block: "FFNBlock",
        packing: RowPacking,
        table: Int32[Array, "experts entry"] | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> Stages:
        """Computes the layer's output for this device's own rows.

        Args:
          table: the slots that hold each expert; None without routed experts.
          layer: see `RoutedExperts`.
        """
        axes, beside = self.axes, NOTHING
        if block.dense is not None and block.own_rows:
            beside = shared_expert(block.dense, packed, packing.unpack)
        gather = functools.partial(collectives.gathered, axes=axes.rows)
        everything, rank = (yield beside.during(packed, gather)), axes.rank()
        message, experts = packing.unpack(self._real(everything)), block.experts
        if experts is not None:
            assert table is not None
            assert message.experts is not None
            assert message.gates is not None
            # Every device sees the same rows in the same order, so that all agree on whose turn it
            # is.
            sizes, gates = experts.sizes, message.gates
            position = None
            if axes.instances > 1:
                position = axes.position(jnp.arange(axes.peers), packed.shape[0]).reshape(-1)
            slots = choose_slots(message.experts, table, sizes.all_slots, position)
            if sizes.shared_ranks:
                shared = choose_shared_rank(message.experts, sizes) == rank
                slots, gates = work_of_rank(slots, gates, shared, rank, sizes)
            message = message._replace(experts=slots, gates=gates)
        share, load = block.unsummed(message, rank, layer)
        if load is not None and experts is not None and table is not None:
            load = expert_load(load, table, rank * experts.local)
        share = yield share
        rows = self.results.summed_rows(self._in_place(share), axes.rows, beside)
        if beside is not NOTHING:
            with jax.named_scope("dense"):
                rows = Unsummed(rows.total() + beside.result().astype(jnp.float32))
        return self.results.over_tensor(rows, axes), load

    def _real(self, rows: UInt[Array, "rows words"]) -> UInt[Array, "real words"]:
        """Selects the rows of the filled blocks."""
        if self.blocks.all_filled:
            return rows
        blocks = rows.reshape(self.blocks.total, -1, rows.shape[1])
        return blocks[np.array(self.blocks.filled)].reshape(-1, rows.shape[1])

    def _in_place(self, share: Unsummed) -> Unsummed:
        """Puts results into the places of their rows, with zeros elsewhere."""
        if self.blocks.all_filled:
            return share
        results, (total, filled) = share.total(), self.blocks
        of_blocks = results.reshape(len(filled), -1, results.shape[1])
        blocks = jnp.zeros((total, *of_blocks.shape[1:]), results.dtype)
        return Unsummed(blocks.at[np.array(filled)].set(of_blocks).reshape(-1, results.shape[1]))


class AllToAllExchange(NamedTuple):
    """A row goes once to each rank that holds at least one of its experts (xDeepServe §3.2), and
    the rank returns one row of results; both ways are ragged all-to-alls.

    If the devices of a rank have different rows, a row goes to each of these devices, and each
    returns its share: a gather in the rank would have the static shape of the worst routing.
    Results are summed in FP32 on the row's device. The shared expert's d_ff is divided over
    `tensor` alone, so that a rank computes it for its own rows. If the shared expert has ranks of
    its own, a row also goes to one of these.
    """

    axes: Axes
    blocks: RowBlocks
    results: Results

    def stages(
        self,
        packed: UInt[Array, "rows words"],
        block: "FFNBlock",
        packing: RowPacking,
        table: Int32[Array, "experts entry"] | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> Stages:
        """See `GatherExchange`."""
        experts, axes = block.experts, self.axes
        assert experts is not None
        assert table is not None
        own = packing.unpack(packed)
        assert own.experts is not None
        sizes, rank = experts.sizes, axes.rank()
        with jax.named_scope("dispatch"):
            device = jax.lax.axis_index(axes.rows)
            position = jnp.arange(packed.shape[0], dtype=jnp.int32) + device
            if axes.instances > 1:
                position = axes.position(device, packed.shape[0])
            slots = choose_slots(own.experts, table, sizes.all_slots, position)
            ranks = slots // sizes.local
            if sizes.shared_ranks:
                shared = choose_shared_rank(own.experts, sizes, first=device)
                ranks = jnp.concatenate([ranks, shared[:, None]], axis=1)
            if axes.instances > 1:  # ranks of other instances count as nowhere
                ranks -= axes.first_rank()
                ranks = jnp.where((ranks >= 0) & (ranks < axes.ranks), ranks, axes.ranks)
            beside = self._beside(packed, block, packing)
            # Inside a host rows travel as long as counts; else they take all that there is to do.
            early = beside if axes.instances > 1 else NOTHING
            plan = make_send_plan(ranks, axes, self.blocks, early)
            received, there = plan.dispatch(packing.addressed(packed, slots), beside)
            received, there = yield received, there
            message = packing.unpack(received)
            assert message.experts is not None
            assert message.gates is not None
            chosen = jnp.where(there[:, None], message.experts, sizes.all_slots)
            # The others' are not needed; so that XLA makes both in one launch.
            gates = jnp.where(there[:, None], message.gates, 0.0)
            if sizes.shared_ranks:
                # Rows come to a rank of the shared expert for no other reason.
                chosen, gates = work_of_rank(chosen, gates, there, rank, sizes)
        with jax.named_scope("experts"):
            choices = experts.choices(message.tokens, chosen, gates, rank, layer, message.wide)
            choices = yield choices
        with jax.named_scope("combine"):
            rows = plan.combine(Unsummed(None, choices), self.results, beside)
        if block.dense is not None:
            with jax.named_scope("dense"):
                whole = beside is not NOTHING
                share = beside.result() if whole else self._shared(packed, block, packing)
                rows = rows._replace(base=share)
        load = expert_load(choices.order.sizes, table, rank * experts.local)
        return self.results.over_tensor(rows, axes), load

    def _beside(
        self, packed: UInt[Array, "rows words"], block: "FFNBlock", packing: RowPacking
    ) -> Beside:
        """Steps of the shared expert on GPUs, if it needs nothing from other devices."""
        if block.dense is None or current_target().backend != "mosaic_gpu":
            return NOTHING
        alone = self.axes.split and jax.lax.axis_size(self.axes.tensor) == 1
        if not (block.whole or alone):
            return NOTHING
        return shared_expert(block.dense, packed, packing.unpack)

    def _shared(
        self, packed: UInt[Array, "rows words"], block: "FFNBlock", packing: RowPacking
    ) -> Float[Array, "rows d_model"]:
        """Applies the shared expert to this device's rows, or its share if others have the rows."""
        tensor, expert = self.axes.tensor, block.dense
        assert expert is not None
        if block.whole or not self.axes.split or jax.lax.axis_size(tensor) == 1:
            own = packing.unpack(packed)
            return expert(own.tokens, own.encoded)
        everything = packing.unpack(jax.lax.all_gather(packed, tensor, axis=0, tiled=True))
        share = expert(everything.tokens, everything.encoded)
        return self.results.summed_rows(Unsummed(share), (tensor,)).total()


class SendPlan(NamedTuple):
    """The rows of one layer that go from each device to each rank.

    Devices are numbered over `axes.rows`; `copies` consecutive devices form a rank and get the same
    rows. A send buffer holds a device's rows sorted by rank; a receive buffer holds the rows of all
    devices, in the order of their numbers. An instance knows its own devices and ranks alone.

    Attributes:
      order: this device's rows, sorted by rank.
      starts: index in a device's send buffer of its first row for a rank.
      places: index in a rank's receive buffer of the first row from a device.
      sizes: number of rows that each device sends to each rank.
      rank: this device's rank.
      device: this device's number.
    """

    axes: Axes
    blocks: RowBlocks
    order: Order
    starts: Int32[Array, "devices ranks"]
    places: Int32[Array, "devices ranks"]
    sizes: Int32[Array, "devices ranks"]
    rank: Int32[Array, ""]
    device: Int32[Array, ""]

    @property
    def copies(self) -> int:
        """Devices of a rank; a row goes to each."""
        return self.sizes.shape[0] // self.sizes.shape[1]

    @property
    def most(self) -> int:
        """Length of a send buffer: a row goes to `top_k` ranks at most, and to each once."""
        rows, top_k = self.order.place.shape
        return rows * min(top_k, self.sizes.shape[1])

    def dispatch(
        self, packed: UInt[Array, "rows words"], beside: Beside = NOTHING
    ) -> tuple[UInt[Array, "received words"], Bool[Array, " received"]]:
        """Sends rows. Returns this device's receive buffer and a mask of the rows that exist, which
        are the first ones."""
        rows, devices = packed.shape[0], self.sizes.shape[0]
        repeat = functools.partial(jnp.repeat, repeats=self.copies, total_repeat_length=devices)
        arriving = self.sizes[:, self.rank]
        # If a device sends nothing, the last row is free: no others fill its place.
        everything = devices * rows // self.blocks.total * len(self.blocks.filled)
        everything += collectives.spare_rows() if not self.blocks.all_filled else 0
        plan = (
            repeat(self.starts[self.device]),
            repeat(self.sizes[self.device]),
            repeat(self.places[self.device]),
            arriving,
        )
        sent = packed[self.order.source[: self.most]]
        received = self._exchange(sent, everything, plan, beside, spared=1)
        return received, jnp.arange(everything) < jnp.sum(arriving)

    def _exchange(
        self, sent: Array, length: int, plan: tuple[Array, ...], beside: Beside, **steps: Any
    ) -> Array:
        axes, rows = self.axes.rows, self.order.place.shape[0]

        def exchange(sent: Array) -> Array:
            return collectives.exchanged_rows(sent, length, *plan, axes=axes, rows=rows)

        return beside.during(sent, exchange, **steps)

    def combine(self, results: Unsummed, form: Results, beside: Beside = NOTHING) -> Unsummed:
        """Sends results back to their rows' devices; returns the sums of this device's rows."""
        devices = self.sizes.shape[0]
        repeat = functools.partial(jnp.repeat, repeats=self.copies, total_repeat_length=devices)
        tensor_rank = self.device % self.copies
        plan = (
            self.places[:, self.rank],
            self.sizes[:, self.rank],
            self.starts[:, self.rank] + tensor_rank * self.most,
            repeat(self.sizes[self.device]),
        )
        length = self.copies * self.most + collectives.spare_rows()
        returned = self._exchange(form.pack(results), length, plan, beside, last=True)
        order = self.order
        if self.copies > 1:
            place = [order.place + copy * self.most for copy in range(self.copies)]
            here = jnp.tile(order.here, (1, self.copies))
            everywhere = jnp.where(here, jnp.concatenate(place, axis=1), -1)
            order = order._replace(place=everywhere, here=here)
        choices = Choices(returned, None, order)
        return Unsummed(None, choices, results.shape[1] if form.int8 else None)


def make_send_plan(
    ranks_chosen: Int[Array, "rows top_k"], axes: Axes, blocks: RowBlocks, beside: Beside = NOTHING
) -> SendPlan:
    """Counts rows by rank, and tells all devices the counts.

    Args:
      ranks_chosen: the rank of every choice of this device's rows; past the last rank: nowhere.
      beside: work to do in the meantime.
    """
    ranks, device = axes.ranks, jax.lax.axis_index(axes.rows)
    if not blocks.all_filled:
        filled = np.zeros(blocks.total, bool)
        filled[list(blocks.filled)] = True
        mine = jnp.asarray(filled.reshape(axes.peers, -1))[device]
        there = jnp.repeat(mine, ranks_chosen.shape[0] // mine.shape[0])
        ranks_chosen = jnp.where(there[:, None], ranks_chosen, ranks)
    order = sort_choices(ranks_chosen.astype(jnp.int32), ranks, once=True)
    gather = functools.partial(collectives.gathered, axes=axes.rows)
    sizes = beside.during(order.sizes[None], gather, spared=2)
    return SendPlan(
        axes,
        blocks,
        order,
        starts=jnp.cumsum(sizes, axis=1) - sizes,
        places=jnp.cumsum(sizes, axis=0) - sizes,
        sizes=sizes,
        rank=jax.lax.axis_index(axes.experts),
        device=device,
    )


Exchange = GatherExchange | AllToAllExchange
"""Computes one layer of the ffn role on all rows of a mesh."""


def make_exchanges(
    kind: ExchangeKind,
    axes: Axes,
    dtype: jnp.dtype,
    blocks: RowBlocks | None = None,
    combine: FormatName | None = None,
) -> dict[FFNKind, Exchange]:
    """Makes the exchange of every kind of layer. Dense layers need all rows on all devices.

    Args:
      dtype: dtype of the model's rows.
      blocks: the blocks of rows; None: no padding.
      combine: format in which results travel that are not yet summed over devices; `dtype` unless
        it has scales.
    """
    blocks, results = blocks or RowBlocks(), Results(dtype, combine is not None and scaled(combine))
    gather = GatherExchange(axes, blocks, results)
    moe: Exchange = AllToAllExchange(axes, blocks, results) if kind == "alltoall" else gather
    return {"dense": gather, "moe": moe}

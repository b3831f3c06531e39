"""How rows get to the devices that hold their experts, and results back to where the rows were.

Called by the programs of the ffn role and of colocated mode, inside their `shard_map`. Every device
brings equally many packed rows, some of which may be padding (ids past the last expert), and gets
their finished results. A table says which slots hold an expert (`replicas.py`). Dropless: what is
received has room for the worst routing. Knows mesh axes and blocks; not how rows came to the mesh,
nor how they are packed.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt

from jaxserve.config.model import FFNKind
from jaxserve.model.blocks import FFNBlock
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.beside import NOTHING, Beside, shared_expert
from jaxserve.model.ffn.collectives import (
    exchanged_rows,
    gathered,
    spare_rows,
    summed,
    summed_int8_rows,
    summed_rows,
)
from jaxserve.model.ffn.replicas import choose_shared_rank, choose_slots, expert_load, work_of_rank
from jaxserve.model.ffn.traffic import ExchangeKind
from jaxserve.model.message import Message
from jaxserve.model.quant.rows import WireFormat
from jaxserve.model.row_width import result_words
from pallas_kernels.grouped_matmul.packed_sums import Sums, Unsummed
from pallas_kernels.grouped_matmul.routed import Choices, Order, sort_choices
from pallas_kernels.target import current_target


class Packing(Protocol):
    """How rows are packed (`link.message.PackedRows`)."""

    def unpack(self, packed: UInt[Array, "rows words"]) -> Message:
        """What is in them."""
        ...

    def addressed(
        self, packed: UInt[Array, "rows words"], slots: Int32[Array, "rows top_k"]
    ) -> UInt[Array, "rows words"]:
        """The same rows with other ids."""
        ...


class Blocks(NamedTuple):
    """The equal blocks that all devices' rows consist of, device after device."""

    total: int = 1
    filled: tuple[int, ...] = (0,)
    """Those that hold rows; the others hold padding, which is neither computed nor sent on."""

    @property
    def all_filled(self) -> bool:
        """Whether there is no padding."""
        return len(self.filled) == self.total


class Exchange(Protocol):
    """One layer of the ffn role on all rows of a mesh."""

    def __call__(
        self,
        packed: UInt[Array, "rows words"],
        block: FFNBlock,
        packing: Packing,
        table: Int32[Array, "experts entry"] | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Sums, Int32[Array, " experts"] | None]:
        """The layer's output for this device's own rows, and how many rows, of all devices, each
        routed expert got on this device (None: the layer has none).

        Args:
          table: which slots hold an expert; None without routed experts.
          layer: see `Experts`.
        """
        ...


class Results(NamedTuple):
    """How results that are not yet summed over devices travel."""

    dtype: jnp.dtype
    """The model's, where they are added up on the way."""
    int8: bool = False
    """Whether all others travel in INT8, with a scale a row."""

    def summed_rows(
        self, shares: Unsummed, axes: tuple[str, ...], beside: Beside = NOTHING
    ) -> Sums:
        """See `collectives`."""
        if self.int8:
            return summed_int8_rows(shares, axes, beside)
        add_up = functools.partial(summed_rows, axes=axes, dtype=self.dtype)
        return Unsummed(beside.during(shares.total(self.dtype), add_up, last=True))

    def over_tensor(self, rows: Sums, axes: Axes) -> Sums:
        """The sums over the devices of a rank, if they have the same rows."""
        return rows if axes.split else Unsummed(summed(rows.total(), axes.tensor, self.dtype))

    def pack(self, results: Unsummed) -> Array:
        """Rows as they travel; those that are sums of nothing, and do not, may be anything."""
        if self.int8:
            return results.packed(result_words(results.shape[1]), everywhere=False)
        return results.total(self.dtype)


def make_exchanges(
    kind: ExchangeKind,
    axes: Axes,
    dtype: jnp.dtype,
    blocks: Blocks | None = None,
    combine: WireFormat | None = None,
) -> dict[FFNKind, Exchange]:
    """The exchange of every kind of layer. Those without routed experts need all rows everywhere.

    Args:
      dtype: of the model's rows.
      blocks: None: all devices' rows are rows.
      combine: format in which results that are not yet summed over devices travel: `int8`, or
        anything else for `dtype`.
    """
    blocks, results = blocks or Blocks(), Results(dtype, combine == "int8")
    gather = GatherExchange(axes, blocks, results)
    moe: Exchange = AllToAllExchange(axes, blocks, results) if kind == "alltoall" else gather
    return {"dense": gather, "moe": moe}


class GatherExchange(NamedTuple):
    """All rows to all devices, whose shares of the results are summed: an all-gather, and back what
    a reduce-scatter moves."""

    axes: Axes
    blocks: Blocks
    results: Results

    def __call__(
        self,
        packed: UInt[Array, "rows words"],
        block: FFNBlock,
        packing: Packing,
        table: Int32[Array, "experts entry"] | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Sums, Int32[Array, " experts"] | None]:
        """See `Exchange`."""
        axes, beside = self.axes, NOTHING
        if block.dense is not None and block.own_rows:
            beside = shared_expert(block.dense, packed, packing.unpack)
        gather = functools.partial(gathered, axes=axes.rows)
        everything, rank = beside.during(packed, gather), axes.rank()
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
        rows = self.results.summed_rows(self._in_place(share), axes.rows, beside)
        if beside is not NOTHING:
            with jax.named_scope("dense"):
                rows = Unsummed(rows.total() + beside.result().astype(jnp.float32))
        return self.results.over_tensor(rows, axes), load

    def _real(self, rows: UInt[Array, "rows words"]) -> UInt[Array, "real words"]:
        """The rows of the filled blocks."""
        if self.blocks.all_filled:
            return rows
        blocks = rows.reshape(self.blocks.total, -1, rows.shape[1])
        return blocks[np.array(self.blocks.filled)].reshape(-1, rows.shape[1])

    def _in_place(self, share: Unsummed) -> Unsummed:
        """The results where their rows were, zeros elsewhere."""
        if self.blocks.all_filled:
            return share
        results, (total, filled) = share.total(), self.blocks
        of_blocks = results.reshape(len(filled), -1, results.shape[1])
        blocks = jnp.zeros((total, *of_blocks.shape[1:]), results.dtype)
        placed = blocks.at[np.array(filled)].set(of_blocks)
        return Unsummed(placed.reshape(-1, results.shape[1]))


class AllToAllExchange(NamedTuple):
    """A row goes once to each rank that holds at least one of its experts (xDeepServe §3.2), which
    returns one row of results; both ways are ragged all-to-alls.

    If the devices of a rank have different rows, a row goes to each of them, and each returns its
    share: no gather in the rank, whose static shape would be that of the worst routing. Results
    are summed in FP32 where the rows were. The shared expert's d_ff is
    divided over `tensor` alone, so that a rank computes it for its own rows; if it has ranks of its
    own, a row goes to one of them, too.
    """

    axes: Axes
    blocks: Blocks
    results: Results

    def __call__(
        self,
        packed: UInt[Array, "rows words"],
        block: FFNBlock,
        packing: Packing,
        table: Int32[Array, "experts entry"] | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Sums, Int32[Array, " experts"] | None]:
        """See `Exchange`."""
        experts, axes = block.experts, self.axes
        assert experts is not None
        assert table is not None
        own = packing.unpack(packed)
        assert own.experts is not None
        sizes, rank = experts.sizes, axes.rank()
        with jax.named_scope("dispatch"):
            turn = axes.device()
            position = jnp.arange(packed.shape[0], dtype=jnp.int32) + turn
            if axes.instances > 1:
                position = axes.position(turn, packed.shape[0])
            slots = choose_slots(own.experts, table, sizes.all_slots, position)
            ranks = slots // sizes.local
            if sizes.shared_ranks:
                shared = choose_shared_rank(own.experts, sizes, turn=turn)
                ranks = jnp.concatenate([ranks, shared[:, None]], axis=1)
            if axes.instances > 1:  # those of others are nowhere
                ranks -= axes.first_rank()
                ranks = jnp.where((ranks >= 0) & (ranks < axes.ranks), ranks, axes.ranks)
            beside = self._beside(packed, block, packing)
            # Inside a host rows travel as long as counts; else they take all that there is to do.
            early = beside if axes.instances > 1 else NOTHING
            plan = make_send_plan(ranks, axes, self.blocks, early)
            received, there = plan.dispatch(packing.addressed(packed, slots), beside)
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
        self, packed: UInt[Array, "rows words"], block: FFNBlock, packing: Packing
    ) -> Beside:
        """The shared expert, on GPUs, where it needs nothing of other devices."""
        if block.dense is None or current_target().backend != "mosaic_gpu":
            return NOTHING
        alone = self.axes.split and jax.lax.axis_size(self.axes.tensor) == 1
        if not (block.whole or alone):
            return NOTHING
        return shared_expert(block.dense, packed, packing.unpack)

    def _shared(
        self, packed: UInt[Array, "rows words"], block: FFNBlock, packing: Packing
    ) -> Float[Array, "rows d_model"]:
        """The shared expert on this device's own rows, or its share if others have them, too."""
        tensor, expert = self.axes.tensor, block.dense
        assert expert is not None
        if block.whole or not self.axes.split or jax.lax.axis_size(tensor) == 1:
            own = packing.unpack(packed)
            return expert(own.tokens, own.encoded)
        of_rank = jax.lax.all_gather(packed, tensor, axis=0, tiled=True)
        everything = packing.unpack(of_rank)
        share = expert(everything.tokens, everything.encoded)
        return self.results.summed_rows(Unsummed(share), (tensor,)).total()


class SendPlan(NamedTuple):
    """Which rows of one layer go from which device to which rank.

    Devices are numbered over `axes.rows`; `copies` consecutive ones make a rank, and each of them
    gets the same rows. A send buffer holds a device's rows sorted by rank; a receive buffer holds
    the rows of all devices, in the order of their numbers.

    Attributes:
      order: this device's rows, sorted by rank.
      starts: index in a device's send buffer of its first row for a rank.
      places: index in a rank's receive buffer of the first row from a device.
      sizes: how many rows each device sends to each rank.
      rank: this device's rank.
      device: this device's number. Of all these, an instance knows its own alone.
    """

    axes: Axes
    blocks: Blocks
    order: Order
    starts: Int32[Array, "devices ranks"]
    places: Int32[Array, "devices ranks"]
    sizes: Int32[Array, "devices ranks"]
    rank: Int32[Array, ""]
    device: Int32[Array, ""]

    @property
    def copies(self) -> int:
        """Devices of a rank that a row goes to."""
        return self.sizes.shape[0] // self.sizes.shape[1]

    @property
    def most(self) -> int:
        """Length of a send buffer: a row goes to `top_k` ranks at most, and to each once."""
        rows, top_k = self.order.place.shape
        return rows * min(top_k, self.sizes.shape[1])

    def dispatch(
        self, packed: UInt[Array, "rows words"], beside: Beside = NOTHING
    ) -> tuple[UInt[Array, "received words"], Bool[Array, " received"]]:
        """This device's receive buffer, and which of its rows exist (the first ones do)."""
        rows, devices = packed.shape[0], self.sizes.shape[0]
        repeat = functools.partial(jnp.repeat, repeats=self.copies, total_repeat_length=devices)
        arriving = self.sizes[:, self.rank]
        # If a device sends nothing, the last row is free: no others fill its place.
        everything = devices * rows // self.blocks.total * len(self.blocks.filled)
        everything += spare_rows() if not self.blocks.all_filled else 0
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
        self,
        sent: Array,
        length: int,
        plan: tuple[Array, ...],
        beside: Beside,
        **steps: Any,
    ) -> Array:
        axes, rows = self.axes.rows, self.order.place.shape[0]

        def exchange(sent: Array) -> Array:
            return exchanged_rows(sent, length, *plan, axes=axes, rows=rows)

        return beside.during(sent, exchange, **steps)

    def combine(self, results: Unsummed, form: Results, beside: Beside = NOTHING) -> Unsummed:
        """Returns results to where their rows came from; the sums of this device's own rows."""
        devices = self.sizes.shape[0]
        repeat = functools.partial(jnp.repeat, repeats=self.copies, total_repeat_length=devices)
        tensor_rank = self.device % self.copies
        plan = (
            self.places[:, self.rank],
            self.sizes[:, self.rank],
            self.starts[:, self.rank] + tensor_rank * self.most,
            repeat(self.sizes[self.device]),
        )
        length = self.copies * self.most + spare_rows()
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
    ranks_chosen: Int[Array, "rows top_k"],
    axes: Axes,
    blocks: Blocks,
    beside: Beside = NOTHING,
) -> SendPlan:
    """Counts rows by rank, and tells all devices the counts.

    Args:
      ranks_chosen: the rank of every choice of this device's rows; past the last rank: nowhere.
      beside: work to do meanwhile.
    """
    ranks, device = axes.ranks, axes.device()
    if not blocks.all_filled:
        filled = np.zeros(blocks.total, bool)
        filled[list(blocks.filled)] = True
        mine = jnp.asarray(filled.reshape(axes.peers, -1))[device]
        there = jnp.repeat(mine, ranks_chosen.shape[0] // mine.shape[0])
        ranks_chosen = jnp.where(there[:, None], ranks_chosen, ranks)
    order = sort_choices(ranks_chosen.astype(jnp.int32), ranks, once=True)
    tell = functools.partial(gathered, axes=axes.rows)
    sizes = beside.during(order.sizes[None], tell, spared=2)
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

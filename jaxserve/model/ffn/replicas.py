"""From logical experts to the slots that hold them, and back: what the table does on devices.

The router chooses logical experts; `choose_slots` turns them into slots by a table that is an
argument of the program (`placement.replica_table`), so that no change of placement recompiles
anything. Where the shared expert has ranks of its own, they take turns as replicas do. Called by
the exchange, inside `shard_map`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxserve.model.ffn.placement import SlotSizes


def choose_slots(
    experts: Int[Array, "tokens top_k"],
    table: Int32[Array, "experts entry"],
    nowhere: int,
    position: Int[Array, " tokens"] | None = None,
) -> Int32[Array, "tokens top_k"]:
    """The slot of every choice: an expert's replicas take turns by the row's position, which evens
    them out without a word between devices (xDeepServe §4.5, step 4).

    Args:
      experts: logical ids; past the last one: padding, which goes nowhere.
      table: the number of an expert's replicas, then their slots.
      nowhere: what padding gets, past the last slot.
      position: of rows; None: as they come.
    """
    padding = (experts < 0) | (experts >= table.shape[0])
    known = jnp.where(padding, 0, experts).astype(jnp.int32)
    replica = jnp.zeros_like(known)
    if table.shape[1] > 2:
        if position is None:
            position = jnp.arange(experts.shape[0], dtype=jnp.int32)
        replica = (position[:, None] + known) % table[known, 0]
    return jnp.where(padding, nowhere, table[known, 1 + replica])


def expert_load(
    load: Int32[Array, " local"], table: Int32[Array, "experts entry"], first: Int[Array, ""] | int
) -> Int32[Array, " experts"]:
    """Tokens of every logical expert on this device.

    Args:
      load: tokens of each of the device's slots.
      first: its first slot.
    """
    slots, place = table[:, 1:], jnp.arange(table.shape[1] - 1)
    mine = first + jnp.arange(load.shape[0])
    here = (slots[:, :, None] == mine) & (place[:, None] < table[:, :1, None])
    return jnp.sum(jnp.where(here, load, 0), axis=(1, 2), dtype=jnp.int32)


def choose_shared_rank(
    experts: Int[Array, "tokens top_k"], sizes: SlotSizes, *, first: Int[Array, ""] | int = 0
) -> Int32[Array, " tokens"]:
    """The rank that computes the shared expert for a row: they take turns, from row to row that is
    no padding, which goes past the last rank.

    Args:
      experts: logical ids; past the last one: padding.
      first: added to their numbers: the device, where every device has rows of its own.
    """
    there = (experts[:, 0] >= 0) & (experts[:, 0] < sizes.experts)
    number = jnp.cumsum(there, dtype=jnp.int32) - 1 + first
    return jnp.where(there, sizes.ranks + number % sizes.shared_ranks, sizes.all_ranks)


def work_of_rank(
    slots: Int[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    shared: Bool[Array, " tokens"],
    rank: Int[Array, ""],
    sizes: SlotSizes,
) -> tuple[Int32[Array, "tokens choices"], Float[Array, "tokens choices"]]:
    """Slots and weights of what a rank computes: its routed experts for the rows that chose them
    or, if it is one of the shared expert's, all parts of that with weight 1. No rank does both, so
    that a row needs no more choices than it has.

    Args:
      shared: rows whose turn with the shared expert it is.
    """
    parts, nowhere = sizes.shared_parts, sizes.all_slots
    more = ((0, 0), (0, max(0, parts - slots.shape[1])))
    slots = jnp.pad(slots, more, constant_values=nowhere).astype(jnp.int32)
    gates = jnp.pad(gates, more)
    part = jnp.arange(slots.shape[1], dtype=jnp.int32)
    own = jnp.where(shared[:, None] & (part < parts), rank * sizes.local + part, nowhere)
    routes = rank < sizes.ranks
    return jnp.where(routes, slots, own), jnp.where(routes, gates, 1.0)

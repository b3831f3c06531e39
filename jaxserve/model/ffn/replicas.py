"""From logical experts to the slots that hold them, and back: what the table does on devices.

The router chooses logical experts; `choose_slots` turns them into slots by a table that is an
argument of the program (`placement.replica_table`), so that no change of placement recompiles
anything. Called by the exchange, inside `shard_map`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


def choose_slots(
    experts: Int[Array, "tokens top_k"],
    table: Int32[Array, "experts entry"],
    nowhere: int,
    *,
    turn: Int[Array, ""] | int = 0,
) -> Int32[Array, "tokens top_k"]:
    """The slot of every choice: an expert's replicas take turns by the row's position, which evens
    them out without a word between devices (xDeepServe §4.5, step 4).

    Args:
      experts: logical ids; past the last one: padding, which goes nowhere.
      table: the number of an expert's replicas, then their slots.
      nowhere: what padding gets, past the last slot.
      turn: added to positions: the device, where every device has rows of its own.
    """
    padding = (experts < 0) | (experts >= table.shape[0])
    known = jnp.where(padding, 0, experts).astype(jnp.int32)
    replica = jnp.zeros_like(known)
    if table.shape[1] > 2:
        position = jnp.arange(experts.shape[0], dtype=jnp.int32)[:, None] + turn
        replica = (position + known) % table[known, 0]
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

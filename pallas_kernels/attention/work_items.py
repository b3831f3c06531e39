"""A flat batch cut into the pieces that kernels work on: a few tokens of one sequence each.

Called by the kernels of `paged_attention`, inside `jit`. Knows nothing of heads, pages or devices.

Tokens that are neighbours in the batch, of one sequence and at neighbouring positions (or, as when
a prefill chunk looks at what was there before it, all at the same one) read the same keys and
values: a kernel that takes them together reads those once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class WorkItems(NamedTuple):
    """In the order of the batch; every token that is not padding is in exactly one item.

    The token at `first + i` has position `kv_length - 1 - (count - 1 - i) * stride`.
    """

    first: Int32[Array, " tokens"]
    """Index in the batch of the item's first token."""
    count: Int32[Array, " tokens"]  # type: ignore[assignment]  # hides a method of tuples
    """Tokens of the item; 0 from `total` on."""
    sequence: Int32[Array, " tokens"]
    """Row of the page table, inside it."""
    kv_length: Int32[Array, " tokens"]
    """Positions that the item's last token sees, without a window: its own position and one."""
    stride: Int32[Array, " tokens"]
    """From one token's position to the next one's: 1 or 0."""
    total: Int32[Array, "1"]
    """Items that there are; those after them have nothing in them."""


def work_items(
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    sequences: int,
    largest: int,
) -> WorkItems:
    """Cut the batch into items of at most `largest` tokens; as many as tokens at the most.

    Raises:
      ValueError: `largest` or `sequences` is not positive.
    """
    if largest < 1 or sequences < 1:
        raise ValueError(
            f"items of at most {largest} tokens of {sequences} sequences, need 1 or more"
        )
    (tokens,) = position.shape
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.clip(sequence_of_token, 0, sequences - 1)
    real = position >= 0
    if largest == 1:
        # A token is an item: as this runs before every layer's attention, it had better be short.
        count = real.astype(jnp.int32)
        columns = (1 - count, token, count, jnp.where(real, sequence, 0), (position + 1) * count)
        _, first, count, sequence, kv_length = jax.lax.sort(columns, num_keys=1, is_stable=True)
        return WorkItems(
            first * count, count, sequence, kv_length, jnp.ones_like(count), jnp.sum(count)[None]
        )
    # The distance from the token before; -1 where that has nothing to do with this one.
    related = real[1:] & real[:-1] & (sequence[1:] == sequence[:-1])
    step = jnp.where(related, position[1:] - position[:-1], -1)
    step = jnp.where((step == 0) | (step == 1), step, -1)
    step = jnp.concatenate([jnp.full(1, -1, jnp.int32), step])
    step_before = jnp.concatenate([jnp.full(1, -1, jnp.int32), step[:-1]])
    # Equal distances all through an item, so that one number stands for all of them.
    continues = (step >= 0) & ((step_before < 0) | (step_before == step))
    run_start = jnp.maximum.accumulate(jnp.where(continues, 0, token))
    starts = real & ((token - run_start) % largest == 0)

    item_of_token = jnp.cumsum(starts, dtype=jnp.int32) - 1
    total = item_of_token[-1:] + 1
    # Padding goes to a place past the end, where scatters drop it.
    place = jnp.where(real, item_of_token, tokens)
    first = jnp.zeros(tokens, jnp.int32).at[jnp.where(starts, place, tokens)].set(token)
    count = jnp.zeros(tokens, jnp.int32).at[place].add(1)
    last = jnp.clip(first + count - 1, 0, tokens - 1)
    exists = count > 0
    return WorkItems(
        first,
        count,
        jnp.where(exists, sequence[first], 0),
        jnp.where(exists, position[last] + 1, 0),
        jnp.where(count > 1, step[last], 1),
        total,
    )

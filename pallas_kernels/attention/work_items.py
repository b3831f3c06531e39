"""Cuts a flat batch into work items for kernels: a few tokens of one sequence each.

Called by the kernels of `paged_attention`, inside `jit`. Knows nothing of heads, pages or devices.

Consecutive tokens of one sequence, at consecutive positions (or all at the same position, as when a
prefill chunk attends to earlier tokens), see the same keys and values. A kernel that processes the
tokens together reads these once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class WorkItems(NamedTuple):
    """Work items in batch order; every token except padding is in exactly one item.

    The token at `first + i` has position `kv_length - 1 - (count - 1 - i) * stride`.
    """

    first: Int32[Array, " tokens"]
    """Index in the batch of the item's first token; from `total` on, of the padding tokens."""
    count: Int32[Array, " tokens"]  # type: ignore[assignment]  # hides a method of tuples
    """Tokens of the item; 0 from `total` on."""
    sequence: Int32[Array, " tokens"]
    """Row of the page table, inside it."""
    kv_length: Int32[Array, " tokens"]
    """Positions that the item's last token sees, without a window: its own position and one."""
    stride: Int32[Array, " tokens"]
    """Difference between the positions of consecutive tokens: 1 or 0."""
    total: Int32[Array, "1"]
    """Number of items; the entries after them are empty, but for `first`."""


def work_items(
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    sequences: int,
    largest: int,
    in_order: bool = False,
) -> WorkItems:
    """Cut the batch into items of at most `largest` tokens; as many as tokens at the most.

    Args:
      in_order: item i is token i, up to the last that is no padding; padding before it is an item
        that sees no position. Only with items of one token.

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
        # Every token is an item. This shortcut matters because it runs before every layer's
        # attention.
        count = real.astype(jnp.int32)
        if in_order:
            total = jnp.max(jnp.where(real, token + 1, 0), keepdims=True)
            kept, length = jnp.where(real, sequence, 0), (position + 1) * count
            return WorkItems(token, jnp.ones_like(count), kept, length, jnp.ones_like(count), total)
        columns = (1 - count, token, count, jnp.where(real, sequence, 0), (position + 1) * count)
        _, first, count, sequence, kv_length = jax.lax.sort(columns, num_keys=1, is_stable=True)
        total = jnp.sum(count)[None]
        return WorkItems(first, count, sequence, kv_length, jnp.ones_like(count), total)
    # Step 1: the difference to the previous token's position; -1 where the two cannot share an
    # item (another sequence, padding, or a gap).
    related = real[1:] & real[:-1] & (sequence[1:] == sequence[:-1])
    step = jnp.where(related, position[1:] - position[:-1], -1)
    step = jnp.where((step == 0) | (step == 1), step, -1)
    step = jnp.concatenate([jnp.full(1, -1, jnp.int32), step])
    step_before = jnp.concatenate([jnp.full(1, -1, jnp.int32), step[:-1]])
    # Step 2: an item starts where a run of equal differences starts, and every `largest` tokens.
    continues = (step >= 0) & ((step_before < 0) | (step_before == step))
    run_start = jnp.maximum.accumulate(jnp.where(continues, 0, token))
    starts = real & ((token - run_start) % largest == 0)

    # Step 3: number the items and collect their fields. What is scattered past the end is dropped.
    item_of_token = jnp.cumsum(starts, dtype=jnp.int32) - 1
    total = item_of_token[-1:] + 1
    place = jnp.where(real, item_of_token, tokens)
    after = total + jnp.cumsum(~real, dtype=jnp.int32) - 1
    first_place = jnp.where(real, jnp.where(starts, place, tokens), after)
    first = jnp.zeros(tokens, jnp.int32).at[first_place].set(token)
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

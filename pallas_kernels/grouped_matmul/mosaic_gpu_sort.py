"""Sorts choices by group on Hopper GPUs (Pallas, Mosaic GPU) in one kernel; XLA takes six.

Called by `routed.py`. For few choices, launches take the time, not comparisons. Every block of
threads holds all choices in registers, and ranks its share: it counts the choices that come before
each.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.mosaic_gpu import WARPGROUP, launch, load, processors, strided
from pallas_kernels.target import Target

BLOCKS = 4
"""Thread blocks of a multiprocessor."""
MOST_CHOICES = 8192
"""Most choices that the registers of a block hold, 64 a thread."""


def covers(choices: int) -> bool:
    """Whether the kernel sorts this number of choices."""
    return 0 < choices <= MOST_CHOICES


def sort(
    group: Int32[Array, " choices"],
    groups: int,
    top_k: int,
    target: Target,
    *,
    once: bool = False,
) -> tuple[Int32[Array, " choices"], Int32[Array, " choices"], Int32[Array, " groups"]]:
    """Returns the token of every row, the row of every choice (-1: none), and the groups' sizes.

    Args:
      group: the group of every choice; `groups` for none, which sorts behind all others.
      once: whether repeated choices of a group by one token count as none, all but the first.
    """
    count, before = group.shape[0], WARPGROUP if once else 0
    padded = jnp.pad(group, (before, -count % WARPGROUP), constant_values=groups + 1)
    of_choices = jax.ShapeDtypeStruct((padded.shape[0] - before,), jnp.int32)
    body = functools.partial(_body, top_k=top_k, before=before)
    out_type = (of_choices, of_choices, jax.ShapeDtypeStruct((groups,), jnp.int32))
    blocks = BLOCKS * processors(target)
    source, place, sizes = launch(body, "sort_choices", out_type, blocks, "block", target)(padded)
    return source[:count], place[:count], sizes


def _body(
    group: Any,  # [before + choices]
    source: Any,  # [choices]
    place: Any,  # [choices]
    sizes: Any,  # [groups]
    *,
    top_k: int,
    before: int,
) -> None:
    """Ranks every `blocks`-th choice and measures every `blocks`-th group, from this block's on.

    Args:
      before: entries of `group` before the first choice, if a token counts once a group; else 0.
    """
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    count, nowhere = source.shape[0], sizes.shape[0]
    # To compare neighbours, choices are read at shifted places, which are not aligned to vectors.
    layout = strided(count, most=1 if before else 4)
    index = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)

    def read(first: int) -> jax.Array:
        return load(group.at[pl.ds(first, count)], layout)

    def first_ones(own: jax.Array, place: jax.Array, earlier: Callable[[int], jax.Array]) -> Any:
        """Returns `own`, replaced by `nowhere` where an earlier choice of the token is the same."""
        found = own
        for back in range(1, top_k if before else 1):
            again = (earlier(back) == own) & (lax.rem(place, top_k) >= back)
            found = jnp.where(again, nowhere, found)
        return found

    everything = first_ones(read(before), index, lambda back: read(before - back))

    def mine(all_of_them: int, body: Any) -> None:
        def run(round_: jax.Array, _: None) -> None:
            body(round_ * blocks + block)

        lax.fori_loop(0, lax.div(all_of_them - block + blocks - 1, blocks), run, None)

    def sort_one(choice: jax.Array) -> None:
        at = before + choice
        of_choice = first_ones(group[at], choice, lambda back: group[at - back])
        earlier = (everything < of_choice) | ((everything == of_choice) & (index < choice))
        row = _count(earlier)
        place[choice] = jnp.where(of_choice < nowhere, row, -1)
        source[row] = lax.div(choice, top_k)

    def measure(number: jax.Array) -> None:
        sizes[number] = _count(everything == number)

    mine(count, sort_one)
    mine(sizes.shape[0], measure)


def _count(found: jax.Array) -> jax.Array:
    return jnp.sum(found.astype(jnp.int32), dtype=jnp.int32)

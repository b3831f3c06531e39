"""Choices sorted by group on Hopper GPUs (Pallas, Mosaic GPU): one kernel, where XLA takes six.

Called by `routed.py`. What few choices take is launches, not comparisons: a block of threads holds
all of them in registers, and counts for some which of all come before.
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

from pallas_kernels.mosaic_gpu import processors
from pallas_kernels.target import Target

WARPGROUP = 128
"""Threads of a block."""
BLOCKS = 4
"""Of threads, a multiprocessor."""
MOST_CHOICES = 8192
"""That a block's registers hold, 64 a thread."""


def covers(choices: int) -> bool:
    """Whether the kernel sorts so many choices."""
    return 0 < choices <= MOST_CHOICES


def sort(
    group: Int32[Array, " choices"],
    groups: int,
    top_k: int,
    target: Target,
    *,
    once: bool = False,
) -> tuple[Int32[Array, " choices"], Int32[Array, " choices"], Int32[Array, " groups"]]:
    """The token of every row, the row of every choice, or -1, and the sizes of the groups.

    Args:
      group: of every choice; `groups`: none, behind all others.
      once: a token's choices of one group but the first are of none.
    """
    count, before = group.shape[0], WARPGROUP if once else 0
    padded = jnp.pad(group, (before, -count % WARPGROUP), constant_values=groups + 1)
    of_choices = jax.ShapeDtypeStruct((padded.shape[0] - before,), jnp.int32)
    source, place, sizes = plgpu.kernel(
        functools.partial(_body, top_k=top_k, before=before),
        kernel_name="sort_choices",
        out_type=(of_choices, of_choices, jax.ShapeDtypeStruct((groups,), jnp.int32)),
        grid=(BLOCKS * processors(target),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None,
    )(padded)
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
    """Every so many choices, and groups, from this block's number on.

    Args:
      before: what is before the first choice; 0: a token may have a group several times.
    """
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    count, nowhere = source.shape[0], sizes.shape[0]
    # What is compared with its neighbours is read from where they are, which is no whole vector.
    vectors = (1,) if before else (4, 2, 1)
    vector = next(size for size in vectors if count % (WARPGROUP * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=vector)
    index = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)

    def read(first: int) -> jax.Array:
        return plgpu.load(group.at[pl.ds(first, count)], layout=layout, optimized=False)

    def first_ones(own: jax.Array, place: jax.Array, earlier: Callable[[int], jax.Array]) -> Any:
        """`own`, and `nowhere` where one of the token's earlier choices is the same."""
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

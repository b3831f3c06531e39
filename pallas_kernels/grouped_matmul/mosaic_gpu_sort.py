"""Choices sorted by group on Hopper GPUs (Pallas, Mosaic GPU): one kernel, where XLA takes six.

Called by `routed.py`. What few choices take is launches, not comparisons: a block of threads holds
all of them in registers, and counts for some which of all come before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    group: Int32[Array, " choices"], groups: int, top_k: int, target: Target
) -> tuple[Int32[Array, " choices"], Int32[Array, " choices"], Int32[Array, " groups"]]:
    """The token of every row, the row of every choice, or -1, and the sizes of the groups.

    Args:
      group: of every choice; `groups`: none, behind all others.
    """
    count = group.shape[0]
    padded = jnp.pad(group, (0, -count % WARPGROUP), constant_values=groups + 1)
    of_choices = jax.ShapeDtypeStruct(padded.shape, jnp.int32)
    source, place, sizes = plgpu.kernel(
        functools.partial(_body, top_k=top_k),
        kernel_name="sort_choices",
        out_type=(of_choices, of_choices, jax.ShapeDtypeStruct((groups,), jnp.int32)),
        grid=(BLOCKS * processors(target),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None,
    )(padded)
    return source[:count], place[:count], sizes


def _body(
    group: Any,  # [choices]
    source: Any,  # [choices]
    place: Any,  # [choices]
    sizes: Any,  # [groups]
    *,
    top_k: int,
) -> None:
    """Every so many choices, and groups, from this block's number on."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    count = group.shape[0]
    vector = next(size for size in (4, 2, 1) if count % (WARPGROUP * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=vector)
    everything = plgpu.load(group, layout=layout, optimized=False)
    index = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)

    def mine(all_of_them: int, body: Any) -> None:
        def run(round_: jax.Array, _: None) -> None:
            body(round_ * blocks + block)

        lax.fori_loop(0, lax.div(all_of_them - block + blocks - 1, blocks), run, None)

    def sort_one(choice: jax.Array) -> None:
        of_choice = group[choice]
        before = (everything < of_choice) | ((everything == of_choice) & (index < choice))
        row = _count(before)
        place[choice] = jnp.where(of_choice < sizes.shape[0], row, -1)
        source[row] = lax.div(choice, top_k)

    def measure(number: jax.Array) -> None:
        sizes[number] = _count(everything == number)

    mine(count, sort_one)
    mine(sizes.shape[0], measure)


def _count(found: jax.Array) -> jax.Array:
    return jnp.sum(found.astype(jnp.int32), dtype=jnp.int32)

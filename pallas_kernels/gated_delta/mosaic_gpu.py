"""Gated DeltaNet's recurrence on Hopper GPUs (Pallas, Mosaic GPU): a block of threads a head.

Called by `api.py`, which has checked the arguments. A block copies the state of one head of one
sequence, 64 KB, to shared memory; three blocks on a multiprocessor hide each other's waits. Each
thread has a column of the state, so that sums over its rows need no exchange between threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gated_delta.reference import Step
from pallas_kernels.mosaic_gpu import WARPGROUP, launch, load, run_in_place, store, strided
from pallas_kernels.target import Target

AT_ONCE = 8
"""Rows of a state in one turn of a loop."""


def gap(step: Step) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    sizes = step.states.shape[2:]
    if sizes != (WARPGROUP, WARPGROUP):
        return f"states of {sizes[0]} x {sizes[1]} ({WARPGROUP} x {WARPGROUP})"
    return ""


def delta_step(step: Step, target: Target) -> tuple[Array, Array]:
    """Runs `api.delta_step` for a call in which `gap` finds nothing."""
    states, page, query, key, value, decay, rate = step
    rows, heads, width = value.shape
    vector = plgpu.SMEM((width,), jnp.float32)
    kernel = launch(
        _body,
        "delta_step",
        (jax.ShapeDtypeStruct(value.shape, value.dtype),),
        rows * heads,
        "block",
        target,
        {
            "state_smem": plgpu.SMEM((width, width), jnp.float32),
            "query_smem": vector,
            "key_smem": vector,
            "loaded": plgpu.Barrier(num_arrivals=3),
        },
    )

    arguments = page, query, key, value, jnp.exp(decay), rate
    (read,), (changed,) = run_in_place(kernel, arguments, (states,), (value,))
    return changed, read


def _body(
    page: Any,  # [rows]
    query: Any,  # [rows, key_heads, key_dim]
    key: Any,  # [rows, key_heads, key_dim]
    value: Any,  # [rows, heads, value_dim]
    factor: Any,  # [rows, heads]
    rate: Any,  # [rows, heads]
    states: Any,  # [pool, heads, key_dim, value_dim]
    read: Any,  # [rows, heads, value_dim]
    *,
    state_smem: Any,  # [key_dim, value_dim]
    query_smem: Any,  # [key_dim]
    key_smem: Any,  # [key_dim]
    loaded: Any,
) -> None:
    """Feeds one token to the state of one head, if the token's row has a page."""
    heads, width = value.shape[1:]
    block, layout = lax.axis_index("block"), strided(width, most=1)
    row, head = block // heads, lax.rem(block, heads)
    own = head // (heads // key.shape[1])
    place = page[row]

    @pl.when(place < states.shape[0])
    def _token() -> None:
        # Both passes read the old state from shared memory, because the second one overwrites it in
        # memory row by row. No other block has this head of this page: rows share no page.
        state = states.at[place, head]
        plgpu.copy_gmem_to_smem(state, state_smem, loaded)
        plgpu.copy_gmem_to_smem(query.at[row, own], query_smem, loaded)
        plgpu.copy_gmem_to_smem(key.at[row, own], key_smem, loaded)
        decay = factor[row, head]
        plgpu.barrier_wait(loaded)
        zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)

        def held(at: Any) -> Any:
            old = load(state_smem.at[at], layout)
            return jnp.where(jnp.broadcast_to(decay, old.shape) > 0, old * decay, zeros)

        def seen(turn: Any, total: Any) -> Any:
            for at in (turn * AT_ONCE + index for index in range(AT_ONCE)):
                total += held(at) * key_smem[at]
            return total

        def changed(turn: Any, total: Any) -> Any:
            for at in (turn * AT_ONCE + index for index in range(AT_ONCE)):
                new = held(at) + change * key_smem[at]
                store(state.at[at], new)
                total += new * query_smem[at]
            return total

        old = lax.fori_loop(0, width // AT_ONCE, seen, zeros)
        change = (load(value.at[row, head], layout) - old) * rate[row, head]
        store(read.at[row, head], lax.fori_loop(0, width // AT_ONCE, changed, zeros))

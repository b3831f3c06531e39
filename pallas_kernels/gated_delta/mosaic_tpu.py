"""Gated DeltaNet's recurrence on a TPU core (Pallas, Mosaic): a grid step a sequence.

Called by `api.py`, which has checked the arguments. Pallas fetches the states of the next sequence
and writes those of the last one while a sequence is computed. 32 heads of 128 x 128 are 2 MB each
way; four such buffers lie in VMEM.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.attention.mosaic_tpu import INTERPRETER
from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES
from pallas_kernels.gated_delta.reference import Step
from pallas_kernels.target import Target

LANES, SUBLANES = 128, 8
"""Columns and rows of a tile of FP32."""


def gap(step: Step) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    _, heads, key_dim, value_dim = step.states.shape
    if key_dim % SUBLANES or value_dim % LANES:
        return f"states of {key_dim} x {value_dim} (multiples of {SUBLANES} x {LANES})"
    if 16 * heads * key_dim * value_dim > VMEM_BYTES:
        return f"{heads} heads of {key_dim} x {value_dim}, four times in {VMEM_BYTES} bytes"
    return ""


def delta_step(step: Step, target: Target) -> tuple[Array, Array]:
    """Runs `api.delta_step` for a call in which `gap` finds nothing."""
    states, page, query, key, value, decay, rate = step
    pool, heads, key_dim, value_dim = states.shape
    rows, key_heads, _ = key.shape
    count = jnp.sum(page < pool, dtype=jnp.int32)
    # Rows that are no token stay at the last token's page, which is neither read nor written again.
    last = page[jnp.maximum(count - 1, 0)]
    page = jnp.where(jnp.arange(rows) < count, page, jnp.minimum(last, pool - 1))
    # A head's key is a column of numbers, one for each row of its state.
    columns = jnp.swapaxes(jnp.concatenate([query, key], axis=1), 1, 2)
    factors = (jnp.broadcast_to(each[..., None], value.shape) for each in (jnp.exp(decay), rate))
    values = jnp.stack([value, *factors], axis=1)

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, *_: (row, *[0] * len(shape)))

    # Pallas fetches a row's state before that of the row before is written back. So no two tokens
    # of a call may share a page (`api.py`): the second would start from the old state.
    state = pl.BlockSpec((1, heads, key_dim, value_dim), lambda row, page, _: (page[row], 0, 0, 0))
    changed, read = pl.pallas_call(
        _kernel,
        name="delta_step",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[of_row(key_dim, 2 * key_heads), of_row(3, heads, value_dim), state],
            out_specs=[state, of_row(heads, value_dim)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ],
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=INTERPRETER if target.interpret else False,
    )(page, count[None], columns, values, states)
    return changed, read


def _kernel(
    _: Any,  # [rows] in scalar memory: pages
    count: Any,  # [1] in scalar memory: rows that are tokens
    columns: Any,  # [1, key_dim, 2 * key_heads]: queries, then keys
    values: Any,  # [1, 3, heads, value_dim]: values, factors of the state, rates
    states: Any,  # [1, heads, key_dim, value_dim]
    changed: Any,  # [1, heads, key_dim, value_dim]
    read: Any,  # [1, heads, value_dim]
) -> None:
    """Feeds one token to the states of its sequence."""
    row, key_heads = pl.program_id(0), columns.shape[2] // 2
    heads, *sizes = states.shape[1:]

    def column(number: int) -> Any:
        return jnp.broadcast_to(columns[0, :, pl.ds(number, 1)], sizes)

    @pl.when(row < count[0])
    def token() -> None:
        for own in range(key_heads):
            query, key = column(own), column(key_heads + own)
            for head in range(own * heads // key_heads, (own + 1) * heads // key_heads):
                value, factor, rate = (values[0, part, pl.ds(head, 1), :] for part in range(3))
                held = jnp.where(factor > 0, states[0, head] * factor, 0)
                change = rate * (value - jnp.sum(held * key, axis=0, keepdims=True))
                held += key * change
                changed[0, head] = held
                read[0, pl.ds(head, 1), :] = jnp.sum(held * query, axis=0, keepdims=True)

    # Without a token the first page is written nonetheless.
    @pl.when((row == 0) & (count[0] == 0))
    def none() -> None:
        changed[...] = states[...]

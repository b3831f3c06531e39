"""Rows as 32-bit words, the unit of copies on TPUs, and waiting for a number of row copies.

Called by the TPU kernels that fetch rows one by one. Narrow rows lie beside each other in a word:
pairs of BF16, fours of 8 bits; the first one has the lowest bits.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Num, UInt32


def as_words(rows: Num[Array, "rows d"]) -> UInt32[Array, "words d"]:
    """Does what `bitcast` of a ref does, for the interpreter, which cannot copy such refs."""
    per_word = 4 // rows.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(rows, jnp.uint32)
    together = rows.reshape(-1, per_word, rows.shape[1])
    return lax.bitcast_convert_type(jnp.swapaxes(together, 1, 2), jnp.uint32)


def wait_for_rows(
    buffer: Any,  # [a power of two, d]
    count: Any,
    arrived: Any,
) -> None:
    """Waits for the copies of `count` rows: semaphores count bytes.

    Tests replace this function to see that a missing wait is noticed.
    """

    def wait_for(rows: int) -> None:
        there = buffer.at[pl.ds(0, rows)]
        pltpu.make_async_copy(there, there, arrived).wait()

    block = buffer.shape[0]
    lax.fori_loop(0, lax.div(count, block), lambda _, carry: wait_for(block), None)
    for bit in range(block.bit_length() - 1):
        pl.when((count >> bit) & 1 == 1)(functools.partial(wait_for, 1 << bit))

"""The experts of one device, from tokens to tokens: permute, grouped products, unpermute.

Called by the expert layer of a model. Knows groups, not ranks. Around the kernels XLA does the work
with gathers both ways: a token for each row of an expert, and a row for each choice of a token. A
scatter-add gives the same sum, but TPUs execute it one row at a time, and GPUs in a different order
each time. For Step-3's layer on v7x (2048 tokens of 3 choices, 7168 wide) it takes over 900
thousand bundles; gathers take 150 thousand, besides those on the way back, which XLA gives to the
SparseCores (static counts, no times; 2026-11-21, jax 0.12.0.1, libtpu 0.0.52).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pallas_kernels.grouped_matmul.api import RowFormat, grouped_swiglu
from pallas_kernels.quantize import QuantArray


class Order(NamedTuple):
    """The permutation that sorts choices by group, with choices of other groups last.

    Attributes:
      source: the token of each row.
      place: the row of each choice of a token.
      here: whether that choice is one of the groups.
      sizes: number of rows of each group.
    """

    source: Int32[Array, " rows"]
    place: Int32[Array, "tokens top_k"]
    here: Bool[Array, "tokens top_k"]
    sizes: Int32[Array, " groups"]


def sort_choices(choices: Int32[Array, "tokens top_k"], groups: int) -> Order:
    """Sorts choices by group; a choice outside 0..groups-1 belongs to no group."""
    here = (choices >= 0) & (choices < groups)
    group = jnp.where(here, choices, groups).reshape(-1)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    # Inverts the permutation by a second sort: TPUs scatter one number at a time, and on GPUs XLA
    # turns it into a scatter.
    place = jnp.argsort(order).astype(jnp.int32).reshape(choices.shape)
    sizes = jnp.sum(jnp.arange(groups)[:, None] == group, axis=1, dtype=jnp.int32)
    return Order(order // choices.shape[1], place, here, sizes)


def combine(
    rows: Float[Array, "rows d"], gates: Float[Array, "tokens top_k"], order: Order
) -> Float32[Array, "tokens d"]:
    """For every token, the sum of its choices' rows times their gates, in the order of choices."""
    # If there are choices of other devices, the last row belongs to one of them and is zero. All of
    # them read that row, which stays in caches.
    place = jnp.where(order.here, order.place, rows.shape[0] - 1)
    gates = jnp.where(order.here, gates, 0).astype(jnp.float32)
    products = [
        rows[place[:, choice]].astype(jnp.float32) * gates[:, choice, None]
        for choice in range(gates.shape[1])
    ]
    return functools.reduce(jnp.add, products)


def routed_swiglu(
    x: Float[Array, "tokens d_model"],
    choices: Int32[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    gate_weights: Float[Array, "groups d_ff d_model"] | QuantArray,
    up_weights: Float[Array, "groups d_ff d_model"] | QuantArray,
    down_weights: Float[Array, "groups d_out d_ff"] | QuantArray,
    *,
    window: tuple[Int[Array, ""] | int, int] | None = None,
    row_format: RowFormat | None = None,
) -> tuple[Float32[Array, "tokens d_out"], Int32[Array, " window"]]:
    """Run every token through the SwiGLU networks that it chose and sum the results, weighted by
    the gates.

    Args:
      choices: [tokens, top_k] networks, counted from the first of the window; choices outside the
        window contribute nothing.
      gates: [tokens, top_k] weights; ignored for choices outside the window.
      window: (first group, number of groups) to use; None: all. Other weights are not read.
      row_format: see `grouped_swiglu`.

    Returns:
      the sums, and the number of tokens of each network of the window.

    Raises:
      ValueError: the shapes, dtypes or formats do not fit together.
      NotImplementedError: the backend has no such `row_format`.
    """
    if choices.ndim != 2 or choices.shape != gates.shape or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"choices {choices.shape} and gates {gates.shape} need to be [tokens, top_k] for x "
            f"{x.shape}"
        )
    groups = gate_weights.shape[0]
    first, count = window or (0, groups)
    order = sort_choices(choices, count)
    sizes = order.sizes
    if window is not None:
        nothing = jnp.zeros(groups, jnp.int32)
        sizes = jax.lax.dynamic_update_slice_in_dim(nothing, sizes, first, axis=0)
    rows = grouped_swiglu(
        x,
        gate_weights,
        up_weights,
        down_weights,
        sizes,
        row_format=row_format,
        source=order.source,
    )
    return combine(rows, gates, order), order.sizes

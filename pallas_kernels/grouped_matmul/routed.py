"""The experts of one device, from tokens to tokens: rows go to their experts, and results back.

Called by the expert layer of a model. Knows groups, not ranks. Around the kernels it is XLA's work:
both ways are gathers, of a token for each row of an expert, and of a row for each choice of a
token. Adding rows up where their tokens are is the same sum, but TPUs do that one row at a time,
and GPUs in another order each time. For Step-3's layer on v7x (2048 tokens of 3 choices, 7168
wide): over 900 thousand bundles, and 150 thousand with gathers, besides those back, which XLA gives
to the SparseCores (no times; 2026-11-21, jax 0.12.0.1, libtpu 0.0.52).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pallas_kernels.grouped_matmul.api import RowFormat, grouped_swiglu
from pallas_kernels.quantize import QuantArray


class Order(NamedTuple):
    """Rows sorted by group, those of no group behind them.

    Attributes:
      source: the token of each row.
      place: the row of each choice of a token.
      here: whether that choice is one of the groups.
      sizes: rows of each group.
    """

    source: Int32[Array, " rows"]
    place: Int32[Array, "tokens top_k"]
    here: Bool[Array, "tokens top_k"]
    sizes: Int32[Array, " groups"]


def sort_choices(choices: Int32[Array, "tokens top_k"], groups: int) -> Order:
    """Where the rows of the choices lie; those outside 0..groups-1 are of no group."""
    here = (choices >= 0) & (choices < groups)
    group = jnp.where(here, choices, groups).reshape(-1)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    # A second sort, since TPUs scatter numbers one by one; on GPUs XLA makes that of it.
    place = jnp.argsort(order).astype(jnp.int32).reshape(choices.shape)
    sizes = jnp.sum(jnp.arange(groups)[:, None] == group, axis=1, dtype=jnp.int32)
    return Order(order // choices.shape[1], place, here, sizes)


def combine(
    rows: Float[Array, "rows d"], gates: Float[Array, "tokens top_k"], order: Order
) -> Float32[Array, "tokens d"]:
    """Of every token the sum of its choices' rows times their gates, choice after choice."""
    # If there are choices elsewhere, the last row is one of theirs, which are zeros. It stands for
    # all of them: caches have it.
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
    """Every token through the SwiGLU networks that it chose, times their gates, added up.

    Args:
      choices: networks, counted from the first of the window; others add nothing.
      gates: of choices outside, anything.
      window: the first of the groups that are meant, and how many; None: all. The rest is not read.
      row_format: see `grouped_swiglu`.

    Returns:
      the sums, and how many tokens each network of the window got.

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

"""The experts of one device, from tokens to tokens: permute, grouped products, unpermute.

Called by the expert layer of a model. Knows groups, not ranks. Around the products XLA gathers a
token for each row of an expert, and a row for each choice of a token. On TPUs the product fetches
the tokens itself (`mosaic_tpu_fetch.py`), and a kernel fetches and sums the rows
(`mosaic_tpu_combine.py`). A scatter-add would give the same sum, but TPUs execute it one row at a
time, and GPUs in a different order each time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Num

from pallas_kernels.activation import SWIGLU, Activation
from pallas_kernels.grouped_matmul.api import Biases, grouped_swiglu
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import QuantArray, Words
from pallas_kernels.target import Target, by_platform, current_target, kernels
from pallas_kernels.transforms import run_op
from pallas_kernels.tuned import Fields


class Order(NamedTuple):
    """The permutation that sorts choices by group, with choices of other groups last.

    Attributes:
      source: the token of each row.
      place: the row of each choice of a token; -1 for choices of other groups.
      here: whether a choice is one of this call's groups.
      sizes: number of rows of each group.
    """

    source: Int32[Array, " rows"]
    place: Int32[Array, "tokens top_k"]
    here: Bool[Array, "tokens top_k"]
    sizes: Int32[Array, " groups"]


class Choices(NamedTuple):
    """Results of the networks, which are still to be added up for each token: see `combine`."""

    rows: Num[Array, "rows d"]
    gates: Float[Array, "tokens top_k"] | None
    """Factors of the rows; None: all are 1."""
    order: Order


def sort_choices(
    choices: Int32[Array, "tokens top_k"], groups: int, *, once: bool = False
) -> Order:
    """Sorts choices by group; a choice outside 0..groups-1 belongs to no group.

    Args:
      once: whether a repeated choice of a group by one token belongs to no group either.
    """
    top_k, target = choices.shape[1], current_target()
    sort = _sorting_kernel(choices.size, target)
    if once and sort is None:
        choices = _first_of_each(choices, groups)
    here = (choices >= 0) & (choices < groups)
    group = jnp.where(here, choices, groups).reshape(-1)
    if sort is not None:
        source, place, sizes = sort(group, groups, top_k, target, once=once)
        place = place.reshape(choices.shape)
        return Order(source, place, place >= 0 if once else here, sizes)
    by_sorting = functools.partial(_by_sorting, groups=groups + 1, top_k=top_k)
    by_counting = functools.partial(_by_counting, groups=groups + 1, top_k=top_k)
    # Counting divides the choices into blocks, of which 0 choices have none.
    default = by_counting if choices.size else by_sorting
    source, place, sizes = by_platform(group, cpu=by_sorting, tpu=by_sorting, default=default)
    place = jnp.where(here, place.reshape(choices.shape), -1)
    return Order(source, place, here, sizes[:groups])


def _sorting_kernel(choices: int, target: Target) -> Callable[..., Any] | None:
    if target.backend != "mosaic_gpu":
        return None
    kernel = kernels("grouped_matmul", target, "_sort")
    return kernel.sort if kernel.covers(choices) else None


def _first_of_each(
    choices: Int[Array, "tokens top_k"], nowhere: int
) -> Int32[Array, "tokens top_k"]:
    """Returns the choices, with repeated choices of a token replaced by `nowhere`."""
    earlier = jnp.tril(jnp.ones((choices.shape[1],) * 2, bool), -1)
    again = jnp.any((choices[:, :, None] == choices[:, None, :]) & earlier, axis=2)
    return jnp.where(again, nowhere, choices).astype(jnp.int32)


def _by_sorting(
    group: Int32[Array, " choices"], groups: int, top_k: int
) -> tuple[Array, Array, Array]:
    """Returns the token of every row, the row of every choice, and the sizes of the groups.

    Inverts the permutation by a second sort: TPUs scatter one number at a time.
    """
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    sizes = jnp.sum(jnp.arange(groups)[:, None] == group, axis=1, dtype=jnp.int32)
    return order // top_k, place, sizes


def _by_counting(
    group: Int32[Array, " choices"], groups: int, top_k: int
) -> tuple[Array, Array, Array]:
    """Returns the same as `_by_sorting`, in few kernels; a sort takes GPUs many."""
    place, sizes = _places(group, groups)
    token = jnp.arange(group.shape[0], dtype=jnp.int32) // top_k
    return jnp.zeros_like(group).at[place].set(token, unique_indices=True), place, sizes


def _places(
    group: Int32[Array, " choices"], groups: int
) -> tuple[Int32[Array, " choices"], Int32[Array, " groups"]]:
    """Returns the place of every choice when sorted stably by group, and the sizes of the groups:
    two sums of comparisons, within blocks of choices, and of each block with all choices."""
    count = group.shape[0]
    block = 1 << (math.isqrt(count * groups).bit_length() - 1)  # both sums have equal work
    block = min(block, count)
    # The padding of the last block sorts behind all choices.
    blocks = jnp.pad(group, (0, -count % block), constant_values=groups).reshape(-1, block)
    index = jnp.arange(count, dtype=jnp.int32)
    # The place that the first choice of a group in a block has, or would have if it existed.
    number = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None, None]
    of_group = jnp.arange(groups, dtype=jnp.int32)[:, None]
    is_before = (group < of_group) | ((group == of_group) & (index < number * block))
    first = jnp.sum(is_before, axis=2, dtype=jnp.int32)  # [blocks, groups]
    within = jnp.arange(block)
    is_earlier = within[:, None] > within
    same = (blocks[:, :, None] == blocks[:, None, :]) & is_earlier
    rank = jnp.sum(same, axis=2, dtype=jnp.int32).reshape(-1)[:count]
    place = first[index // block, group] + rank
    starts = first[0]
    return place, jnp.diff(starts, append=count)


def combine(
    rows: Float[Array, "rows d"],
    gates: Float[Array, "tokens top_k"] | None,
    order: Order,
    base: Float[Array, "tokens d"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "tokens d"]:
    """Returns for every token the sum of its choices' rows, times their gates if given, in the
    order of choices, and of `base` if given. Sums are FP32, rounded to `dtype`. Rows and gates that
    belong to no choice may hold anything.
    """
    if gates is None:
        gates = jnp.ones(order.place.shape, jnp.float32)
    target = current_target()
    if target.backend == "mosaic_tpu":
        kernel = kernels("grouped_matmul", target, "_combine")
        if kernel.covers(rows.shape, rows.dtype, order.place.shape):
            arrays = (rows, gates, order.place, order.here)
            by_kernel = functools.partial(kernel.combine, target=target, dtype=dtype)
            return run_op("combine", by_kernel, *arrays, base)
    # Choices that are not here all read one row, which stays in caches.
    place = jnp.where(order.here, order.place, 0)
    products = [
        jnp.where(
            order.here[:, choice, None],
            rows[place[:, choice]].astype(jnp.float32) * gates[:, choice, None],
            0.0,
        )
        for choice in range(gates.shape[1])
    ]
    total = functools.reduce(jnp.add, products)
    return (total if base is None else base.astype(jnp.float32) + total).astype(dtype)


def routed_choices(
    x: Float[Array, "tokens d_model"],
    choices: Int32[Array, "tokens top_k"],
    gates: Float[Array, "tokens top_k"],
    gate_weights: Float[Array, "groups d_ff d_model"] | QuantArray | InputMajor | Words,
    up_weights: Float[Array, "groups d_ff d_model"] | QuantArray | InputMajor | Words,
    down_weights: Float[Array, "groups d_out d_ff"] | QuantArray | InputMajor | Words,
    *,
    window: tuple[Int[Array, ""] | int, int] | None = None,
    row_format: RowFormat | None = None,
    narrow: QuantArray | None = None,
    among: int | None = None,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
    tiles: Fields | None = None,
) -> Choices:
    """Runs every token through the SwiGLU networks that it chose; `combine` sums the results.

    Args:
      choices: [tokens, top_k] networks, counted from the first of the window; choices outside the
        window contribute nothing.
      gates: [tokens, top_k] weights; ignored for choices outside the window.
      window: (first group, number of groups) to use; None: all. Other weights are not read.
      among: number of networks to choose from, on all devices; None: those of the window.
      row_format, narrow, activation, biases, tiles: see `grouped_swiglu`.

    Returns:
      the results, and with their order the number of tokens of each network of the window.

    Raises:
      ValueError: the shapes, dtypes, formats or tiles do not fit together.
      NotImplementedError: as `grouped_swiglu`.
    """
    if choices.ndim != 2 or choices.shape != gates.shape or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"choices {choices.shape} and gates {gates.shape} need to be [tokens, top_k] for x "
            f"{x.shape}"
        )
    first, count = window or (None, gate_weights.shape[0])
    order = sort_choices(choices, count)
    rows = grouped_swiglu(
        x,
        gate_weights,
        up_weights,
        down_weights,
        order.sizes,
        row_format=row_format,
        source=order.source,
        narrow=narrow,
        zero_padding=False,
        average=choices.size // (among or count),
        activation=activation,
        biases=biases,
        first=first,
        tiles=tiles,
    )
    return Choices(rows, gates, order)

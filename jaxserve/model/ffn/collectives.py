"""Collectives of an exchange that JAX lacks in the needed form, by platform.

Called by `exchange.py`, inside its `shard_map`. Knows arrays and mesh axes, not what rows mean.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

from jaxserve.model.ffn.beside import NOTHING, Beside
from jaxserve.model.row_width import result_words
from pallas_kernels.grouped_matmul.packed_sums import Parts, Sums, Unsummed, sum_and_pack
from pallas_kernels.target import current_target


def gathered(rows: Array, axes: tuple[str, ...]) -> Array:
    """Gathers the rows of all devices, in the order of the devices' numbers."""
    if _alone(axes):  # XLA:CPU has devices wait for themselves
        return rows
    return jax.lax.all_gather(rows, axes, axis=0, tiled=True)


def summed_rows(
    shares: Float[Array, "all_rows d_model"], axes: tuple[str, ...], dtype: jnp.dtype
) -> Float32[Array, "rows d_model"]:
    """Sums the shares of all devices of `axes`; returns this device's part of the rows.

    In 16 bits shares travel in `dtype`: half of FP32's bytes. On TPUs, whose links make rings, a
    reduce-scatter adds them on the way, rounding every sum. Elsewhere all-to-alls move as many
    bytes, the last axis' first, so that few cross between the devices of the others. Their sums are
    FP32, in the order of the devices: a row's bits do not depend on its place among the rows.
    """
    if _alone(axes):
        return shares.astype(dtype).astype(jnp.float32)
    if dtype.itemsize > 2:
        return jax.lax.psum_scatter(shares, axes, scatter_dimension=0, tiled=True)
    return jax.lax.platform_dependent(
        shares.astype(dtype),
        tpu=lambda own: jax.lax.psum_scatter(own, axes, tiled=True).astype(jnp.float32),
        default=functools.partial(_summed_here, axes=axes),
    )


def _alone(axes: tuple[str, ...]) -> bool:
    return all(jax.lax.axis_size(axis) == 1 for axis in axes)


def _summed_here(
    shares: Float[Array, "all_rows d_model"], axes: tuple[str, ...]
) -> Float32[Array, "rows d_model"]:
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    rows = shares.reshape(*sizes, -1, shares.shape[1])
    for place, axis in reversed(list(enumerate(axes))):
        arrived = jax.lax.all_to_all(rows.astype(shares.dtype), axis, place, 0)
        rows = jnp.sum(arrived, axis=0, dtype=jnp.float32)
    return rows


def summed_int8_rows(shares: Unsummed, axes: tuple[str, ...], beside: Beside = NOTHING) -> Sums:
    """Sums shares that travel in INT8 with a scale a row, as `summed_rows` does for floats.

    Uses all-to-alls on every platform, because a reduce-scatter cannot add scaled rows. With two
    axes, the most that a mesh has, the sums over the last axis are rounded again. Returns FP32 sums
    to which the last arrivals are still to be added.

    Args:
      beside: work to do meanwhile, a step of it for each of the all-to-alls.
    """
    sizes = {axis: jax.lax.axis_size(axis) for axis in axes if jax.lax.axis_size(axis) > 1}
    if not sizes:  # nothing travels
        return shares
    (_, d_model), (*first, last) = shares.shape, sizes
    words, outer = result_words(d_model), math.prod(sizes[axis] for axis in first)
    # Blocks that go to the same device of the last axis are together, as an all-to-all takes them.
    packed = shares.packed(words, (outer, sizes[last]))
    for axis in reversed(first):
        packed = sum_and_pack(_exchanged(packed, sizes[last], last, beside), d_model)
        last = axis
    return Parts(_exchanged(packed, sizes[last], last, beside), d_model)


def _exchanged(
    packed: Int8[Array, "all_rows words"], size: int, axis: str, beside: Beside
) -> Int8[Array, "devices rows words"]:
    blocks = packed.reshape(size, -1, packed.shape[1])
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    return beside.during(blocks, exchange)


def summed(
    share: Float[Array, "rows d_model"], axis: str, dtype: jnp.dtype
) -> Float32[Array, "rows d_model"]:
    """Sums the shares of all devices of `axis`, which travel in `dtype`."""
    return jax.lax.psum(share.astype(dtype), axis).astype(jnp.float32)


def ragged_all_to_all(
    operand: Array, output: Array, *plan: Int32[Array, " devices"], axes: tuple[str, ...], rows: int
) -> Array:
    """Runs `jax.lax.ragged_all_to_all`, or on CPUs, which lack it, an all-to-all of padded pieces.

    Args:
      plan: offsets and sizes as in `padded_all_to_all`.
      rows: most rows that one device sends to another.
    """
    return jax.lax.platform_dependent(
        *(operand, output, *plan),
        cpu=functools.partial(padded_all_to_all, axes=axes, rows=rows),
        default=functools.partial(jax.lax.ragged_all_to_all, axis_name=axes),
    )


def exchanged_rows(
    operand: Array, length: int, *plan: Int32[Array, " devices"], axes: tuple[str, ...], rows: int
) -> Array:
    """Runs a ragged all-to-all into a new array; rows that no device sends have any value.

    XLA's GPU kernel waits for rows of every device on other hosts and skips devices without any
    (`roles/compilation.py`). On GPUs a device without rows for another one therefore sends one
    row into the last row of the result, which must be free then (`spare_rows`).

    Args:
      length: rows of the result.
      plan: offsets and sizes as in `padded_all_to_all`.
    """

    def of_zeros(operand: Array, *plan: Array) -> Array:
        output = jnp.zeros((length, operand.shape[1]), operand.dtype)
        return ragged_all_to_all(operand, output, *plan, axes=axes, rows=rows)

    def never_nothing(operand: Array, *plan: Array) -> Array:
        start, sent, to, arriving = plan
        output = jax.lax.empty((length, operand.shape[1]), operand.dtype)
        start, to = jnp.minimum(start, operand.shape[0] - 1), jnp.where(sent > 0, to, length - 1)
        sizes = jnp.maximum(sent, 1), jnp.maximum(arriving, 1)
        return jax.lax.ragged_all_to_all(
            operand, output, start, sizes[0], to, sizes[1], axis_name=axes
        )

    return jax.lax.platform_dependent(operand, *plan, cuda=never_nothing, default=of_zeros)


def spare_rows() -> int:
    """Rows beyond those that arrive that `exchanged_rows` needs: one on GPUs."""
    target = current_target()
    return int(target.device_kind != "cpu" and target.backend != "mosaic_tpu")


def padded_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Int32[Array, " devices"],
    send_sizes: Int32[Array, " devices"],
    output_offsets: Int32[Array, " devices"],
    recv_sizes: Int32[Array, " devices"],
    *,
    axes: tuple[str, ...],
    rows: int,
) -> Array:
    """Runs a ragged all-to-all with pieces of `rows` rows, whatever their sizes. Every platform has
    it; it moves as many bytes as a gather."""
    within = jnp.arange(rows, dtype=jnp.int32)
    places = jnp.minimum(input_offsets[:, None] + within, operand.shape[0] - 1)
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
    )
    pieces, starts = exchange(operand[places]), exchange(output_offsets)
    target = jnp.where(within < recv_sizes[:, None], starts[:, None] + within, output.shape[0])
    return output.at[target.reshape(-1)].set(pieces.reshape(-1, *operand.shape[1:]), mode="drop")

"""Helpers shared by the Hopper kernels of all ops. Imported by them only."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import multiprocessors_of
from pallas_kernels.quantize.bits import as_bits, from_bits
from pallas_kernels.target import Target

WARPGROUP = 128
"""Threads of a warpgroup."""

SHARED_MEMORY = 232_448
"""Bytes of shared memory of a thread block."""

INTERPRETED_PROCESSORS = 2

LEFT_BY_PRODUCTS = 8
"""Most multiprocessors that matrix products leave to collectives: tiles of Step-3's three experts
fill 120, and now and then one more (docs/measurements/kernels.md)."""

SMALLEST_SCALE = 2.0**-100
"""Smallest scale; rows that would need a smaller one become zeros with the scale 1."""


def quantise(rows: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantises rows in FP32, [rows, d], or a single row, [d], as `quantize_rows` does.

    Returns:
      values in `dtype`, FP8 or INT8, and scales, one a row.
    """
    scales = scales_of(jnp.max(jnp.abs(rows), axis=-1), dtype)
    return narrowed(rows, scales, dtype), scales


def scales_of(magnitudes: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scales of rows with these largest magnitudes in `dtype`, FP8 or INT8."""
    scales = magnitudes * (1.0 / _largest(dtype))
    return jnp.where(scales < SMALLEST_SCALE, jnp.ones_like(scales), scales)


def narrowed(rows: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Divides rows, or parts of rows, by their scales, and rounds them to `dtype`."""
    largest, inverse = _largest(dtype), 1.0 / scales
    scaled = rows * jax.lax.broadcast_in_dim(inverse, rows.shape, tuple(range(inverse.ndim)))
    scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    return (jnp.round(scaled) if jnp.dtype(dtype) == jnp.int8 else scaled).astype(dtype)


def _largest(dtype: Any) -> float:
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else 448.0


def launch(
    body: Any, name: str, out_type: Any, blocks: int, axis: str, target: Target, scratch: Any = ()
) -> Any:
    """Returns a kernel whose `blocks` blocks of threads, counted by a grid axis of this name, are
    one warpgroup each."""
    return plgpu.kernel(
        body,
        kernel_name=name,
        out_type=out_type,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=(axis,),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
        interpret=interpreter(target),
    )


def run_in_place(
    kernel: Any, arguments: tuple[Any, ...], arrays: tuple[Any, ...], results: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Calls a kernel that changes `arrays`, its last arguments, where they lie. It gets bits of FP8
    as FP8. Returns its results, of these types, and the arrays."""

    def run(state: Any) -> None:
        # A reference is what a kernel may change.
        changed, found = state
        for one, new in zip(found, kernel(*arguments, *changed), strict=True):
            one[...] = new

    empty = tuple(jnp.zeros(one.shape, one.dtype) for one in results)
    changed, found = pl.run_state(run)((tuple(map(from_bits, arrays)), empty))
    bits = map(lambda old, new: as_bits(new) if old.dtype == jnp.uint8 else new, arrays, changed)
    return found, tuple(bits)


def interpreter(target: Target) -> Any:
    """Returns the parameters of Pallas' interpreter for GPU kernels; None to compile."""
    return plgpu.InterpretGPUParams(detect_races=True) if target.interpret else None


def strided(width: int, most: int = 8) -> Any:
    """Returns the layout of a row of `width` numbers, a multiple of `WARPGROUP`, in the registers
    of a warpgroup. A thread holds up to `most` neighbours: 8 of 16 bits are one access."""
    fitting = (size for size in (16, 8, 4, 2, 1) if width % (WARPGROUP * size) == 0)
    vector = next(size for size in fitting if size <= most)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


def load(source: Any, layout: Any) -> jax.Array:
    """Loads a ref in shared or global memory into registers, in any layout; see `store`."""
    return plgpu.load(source, layout=layout, optimized=False)


def store(target: Any, value: Any) -> None:
    """Writes a value of any layout to a ref in shared or global memory.

    JAX requires an explicit opt-in where the layout prevents the fastest store.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:  # JAX 0.11
        target[...] = value


def processors(target: Target) -> int:
    """Returns the number of multiprocessors of the device that matrix products use."""
    if target.interpret:
        return INTERPRETED_PROCESSORS
    return multiprocessors_of(target.device_kind) - min(target.left, LEFT_BY_PRODUCTS)

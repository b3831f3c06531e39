"""Leaves as JAX arrays: every device's part is made on the host once and put on the device.

Called by the checkpoints (`hf.py`, `store.py`), which know how a part is made.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jaxserve.checkpoint.regions import Ranges, scale_block
from jaxserve.errors import CheckpointError
from jaxserve.mesh import sharded_zeros
from jaxserve.module import Template
from pallas_kernels.quantize.api import WeightFormat, quantize_weight


class Leaf(NamedTuple):
    """A leaf to be made, of one block or of several behind each other (`layers`)."""

    shape: tuple[int, ...]
    """Of one block."""
    dtype: jnp.dtype
    sharding: NamedSharding
    """Of the whole array."""
    layers: int | None = None
    """None: one block, and no axis for it."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def of(self, dtype: DTypeLike) -> "Leaf":
        """The same in another dtype."""
        return self._replace(dtype=jnp.dtype(dtype))

    def of_one_layer(self) -> "Leaf":
        """One entry of the stack."""
        spec = PartitionSpec(*self.sharding.spec[1:])
        return self._replace(sharding=NamedSharding(self.sharding.mesh, spec), layers=None)


def wanted_leaves(
    template: Template, shardings: Sequence[Sharding], layers: int | None
) -> dict[str, Leaf]:
    """The template's leaves by name."""
    leaves = {}
    for name, leaf, sharding in zip(template.names, template.leaves, shardings, strict=True):
        assert isinstance(sharding, NamedSharding)
        leaves[name] = Leaf(leaf.shape, leaf.dtype, sharding, layers)
    return leaves


def make_leaves(
    leaves: Mapping[str, Leaf],
    names: Collection[str],
    plain: Callable[[str, Leaf], jax.Array],
    quantised: Callable[[str, Leaf, Leaf], tuple[jax.Array, jax.Array]],
) -> Iterator[jax.Array]:
    """The leaves in their order, made one by one, those of a matrix in 8 bits two by two.

    Args:
      names: what the block is made of: leaves, and matrices that may be two leaves.
      plain: makes a leaf of this name.
      quantised: makes the values and the scales of the matrix of this name.
    """
    ready: dict[str, jax.Array] = {}
    for name, leaf in leaves.items():
        if name in names:
            yield plain(name, leaf)
            continue
        if name not in ready:
            base = name.rsplit(".", 1)[0]
            pair = f"{base}.values", f"{base}.scales"
            ready = dict(zip(pair, quantised(base, *(leaves[part] for part in pair)), strict=True))
        yield ready.pop(name)


def make_array(leaf: Leaf, make: Callable[[list[Ranges]], list[np.ndarray]]) -> jax.Array:
    """An array of parts.

    Args:
      make: gets the parts' ranges, no two of them equal, and gives their values, which nobody
        changes afterwards: on CPU devices they are the array.
    """
    shape = leaf.full_shape
    ranges: dict[jax.Device, Ranges] = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        for device, index in leaf.sharding.addressable_devices_indices_map(shape).items()
    }
    unique = list(dict.fromkeys(ranges.values()))
    parts = dict(zip(unique, make(unique), strict=True))
    arrays = [jax.device_put(parts[own], device) for device, own in ranges.items()]
    array = jax.make_array_from_single_device_arrays(shape, leaf.sharding, arrays)
    # Else parts of the next leaves would wait on the host for their turn to be copied.
    return jax.block_until_ready(array)


def block_of(values: Leaf, scales: Leaf) -> tuple[int, int]:
    """(block_out, block_in) of a quantised matrix, by its leaves' shapes; 0: the whole axis.

    Raises:
      CheckpointError: the shapes do not fit each other.
    """
    (d_out, d_in), (rows, columns) = values.shape[-2:], scales.shape[-2:]
    if columns == 1 and rows == d_out:
        return 1, 0
    try:
        return scale_block(d_out, rows), scale_block(d_in, columns)
    except CheckpointError as error:
        raise CheckpointError(f"values {values.shape}, scales {scales.shape}: {error}") from None


@functools.lru_cache(maxsize=256)
def quantiser(values: Leaf, scales: Leaf) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """A compiled function from a whole matrix on the devices to its values and scales there."""
    block = block_of(values, scales)
    kind: WeightFormat = "fp8" if block == (1, 0) else "fp8_block"
    if values.dtype == jnp.int8:
        kind = "int8"

    def quantise(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        quantised = quantize_weight(matrix, kind, block)
        return quantised.values, quantised.scales

    return jax.jit(quantise, out_shardings=(values.sharding, scales.sharding))


def quantised_here(
    values: Leaf, scales: Leaf, floats: DTypeLike, plain: Callable[[int | None, Leaf], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The two leaves of a matrix in 8 bits, quantised on the devices; of a stack layer by layer, so
    that no more than one layer is there as floats.

    Args:
      floats: dtype of the matrix before.
      plain: makes it, of one layer of a stack or (None) of the one block.
    """
    if values.layers is None:
        return quantiser(values, scales)(plain(None, values.of(floats)))
    quantise = quantiser(values.of_one_layer(), scales.of_one_layer())
    of_values, of_scales = zeroed(values), zeroed(scales)
    for index in range(values.layers):
        layer = quantise(plain(index, values.of(floats).of_one_layer()))
        of_values, of_scales = fill(of_values, layer[0], index), fill(of_scales, layer[1], index)
        jax.block_until_ready((of_values, of_scales))
    return of_values, of_scales


def zeroed(leaf: Leaf) -> jax.Array:
    """A stack of zeros, to be filled by `fill`."""
    return sharded_zeros(leaf.full_shape, leaf.dtype, leaf.sharding)


@functools.partial(jax.jit, donate_argnums=0)
def fill(stack: jax.Array, layer: jax.Array, index: int | jax.Array) -> jax.Array:
    """The stack, changed in place, with this layer at its place."""
    return stack.at[index].set(layer)

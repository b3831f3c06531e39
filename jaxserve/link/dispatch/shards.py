"""Takes arrays apart into shards and assembles them, at the least cost to the host.

On every call JAX's public functions check and look up facts that never change in a hot loop. The
private functions used here are tried once (`put.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.link.dispatch.put import proved

Shards = Callable[[jax.Array], Sequence[jax.Array]]
"""Returns this process's shards of an array, one array a device, in the sharding's order."""
Assemble = Callable[[Sequence[jax.Array]], jax.Array]
"""Assembles an array of one shape and sharding from its shards."""


def public_shards(array: jax.Array) -> Sequence[jax.Array]:
    """Takes an array apart through JAX's public interface."""
    return [shard.data for shard in array.addressable_shards]


def public_assemble(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> Assemble:
    """Assembles an array through JAX's public interface: 20 µs and more for every shard."""
    return lambda shards: jax.make_array_from_single_device_arrays(
        shape, sharding, list(shards), dtype=dtype
    )


@functools.cache
def fast_shards() -> tuple[Shards, Callable[..., Assemble]]:
    """Returns functions that take an array apart and assemble one, without checks if possible."""
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()[-1:]), ("x",)), PartitionSpec("x"))
    probe = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), sharding)

    def works(pair: tuple[Shards, Callable[..., Assemble]]) -> bool:
        shards = pair[0](probe)
        whole = pair[1](probe.shape, probe.dtype, sharding)(shards)
        same = whole.sharding == sharding and np.array_equal(whole, probe)
        return same and len(shards) == 1 and isinstance(shards[0].sharding, SingleDeviceSharding)

    return proved((_private_shards, _private_assemble), (public_shards, public_assemble), works)


def _private_shards(array: Any) -> Sequence[jax.Array]:
    return array._arrays


def _private_assemble(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> Assemble:
    from jax._src.array import ArrayImpl

    make: Any = ArrayImpl
    aval = jax.core.ShapedArray(shape, dtype)
    return lambda shards: make(aval, sharding, shards, committed=True, _skip_checks=True)

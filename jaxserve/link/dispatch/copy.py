"""Copies arrays to other devices, and takes shards apart and together, at the least cost to the
host.

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

Copy = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
"""Takes one array and returns one, each in a sequence, so that the C++ call needs no wrapper."""


def public_copy(sharding: jax.sharding.Sharding) -> Copy:
    """Copies through JAX's public interface: about eight jitted calls' worth of host time."""
    return lambda arrays: [jax.device_put(x, sharding) for x in arrays]


@functools.cache
def fast_copy() -> Callable[[jax.sharding.Sharding], Copy]:
    """Makes the C++ copy under `device_put`, or `device_put` if the private call has changed.

    The private call proves itself first: a copy to a local device must arrive unchanged.
    """
    sharding = SingleDeviceSharding(jax.local_devices()[-1])
    probe = jax.device_put(np.arange(7, dtype=np.int32), jax.local_devices()[0])

    def works(make: Callable[[jax.sharding.Sharding], Copy]) -> bool:
        (arrived,) = make(sharding)([probe])
        return arrived.sharding == sharding and np.array_equal(arrived, probe)

    return proved(_private_copy, public_copy, works)


def _private_copy(sharding: jax.sharding.Sharding) -> Copy:
    from jax._src.lib import xla_client

    batched = xla_client.batched_copy_array_to_devices_with_sharding
    devices, shardings = [sharding._internal_device_list], [sharding]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda arrays: batched(arrays, devices, shardings, reuse)


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


@functools.cache
def fast_first() -> Callable[[jax.Array], jax.Array]:
    """Returns a function that takes the first of an array's shards in this process. JAX makes all
    shards, 4 µs each, when asked for any, but has one call for replicated arrays."""
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()[:2]), ("x",)), PartitionSpec("x"))
    probe = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), sharding)
    expected = probe.addressable_shards[0].data

    def works(first: Callable[[jax.Array], jax.Array]) -> bool:
        found = first(probe)
        return found.sharding == expected.sharding and np.array_equal(found, expected)

    return proved(_private_first, lambda array: public_shards(array)[0], works)


def _private_first(array: Any) -> jax.Array:
    first: jax.Array = array._fully_replicated_shard()
    return first


def _private_shards(array: Any) -> Sequence[jax.Array]:
    return array._arrays


def _private_assemble(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> Assemble:
    from jax._src.array import ArrayImpl

    make: Any = ArrayImpl
    aval = jax.core.ShapedArray(shape, dtype)
    return lambda shards: make(aval, sharding, shards, committed=True, _skip_checks=True)

"""Copies whole arrays to other devices inside one runtime, at the least cost to the host.

Used by `transports/device_put.py`. On every call JAX's public functions check and look up facts
that never change in a hot loop. The private functions used here are tried once (`put.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.link.dispatch.put import proved
from jaxserve.link.dispatch.shards import public_shards

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

"""Puts arrays of the host on this process's devices, as cheaply for the host as JAX can.

On every call JAX's public functions check and look up facts that never change in a hot loop. The
private functions used here and in `device_put.py` are tried once on this process's devices; if one
does not behave as expected, the public function takes its place.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def proved[F](private: F, public: F, works: Callable[[F], bool]) -> F:
    """Returns the private function if it works on this process's devices, else the public one."""
    try:
        if works(private):
            return private
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return public


Put = Callable[[Sequence[jax.Array | np.ndarray]], jax.Array]
"""Copies arrays of one device each, or of the host, to this process's devices of a sharding, in its
order, and makes one array: for one shape and sharding."""


@functools.cache
def fast_put() -> Callable[..., Put]:
    """Makes such a call of one piece of C++. It takes half the time of assembling an array, copying
    it and taking the copy apart. Made of public calls if the private one has changed."""
    here, there = jax.local_devices()[0], jax.local_devices()[-1]
    sharding = NamedSharding(Mesh(np.array([there]), ("x",)), PartitionSpec("x"))
    probe = jax.device_put(np.arange(6, dtype=np.int32).reshape(2, 3), here)

    def works(make: Callable[..., Put]) -> bool:
        whole = make(probe.shape, probe.dtype, sharding)([probe])
        return whole.sharding == sharding and whole.committed and np.array_equal(whole, probe)

    return proved(_private_put, public_put, works)


def public_put(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Put:
    """Puts and assembles through JAX's public interface."""
    devices = sharding.mesh.local_devices
    return lambda pieces: jax.make_array_from_single_device_arrays(
        shape, sharding, list(map(jax.device_put, pieces, devices)), dtype=dtype
    )


def _private_put(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Put:
    from jax._src.lib import xla_client

    put = xla_client.batched_device_put
    aval = jax.core.ShapedArray(shape, dtype)
    devices = list(sharding.mesh.local_devices)
    return lambda arrays: put(aval, sharding, arrays, devices, committed=True)

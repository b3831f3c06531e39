"""Defines `jax.grad` and `jax.vmap` of an op that has a kernel, alike on every platform.

Every such op's `api.py` runs its backends here. Serving differentiates nothing. Neither the kernels
nor the references' loops, whose lengths only the device knows, can be differentiated in reverse.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import sequential_vmap


def run_op(op: str, compute: Callable[..., Any], *arrays: Any) -> Any:
    """Calls `compute(*arrays)`, which takes and returns pytrees of arrays.

    `jax.vmap` of this calls `compute` for one element after the other, in a loop on the device.
    Array arguments must be in `arrays`; arrays that `compute` holds itself are constants.

    Raises:
      NotImplementedError: the call is differentiated, in whatever mode.
    """

    @jax.custom_jvp
    def run(*arrays: Any) -> Any:
        return sequential_vmap(compute)(*arrays)

    @run.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{op} has no gradient, on no platform: it is for serving. Take it out of what is "
            "differentiated (jax.lax.stop_gradient of its arguments), or use an op for training"
        )

    return run(*arrays)

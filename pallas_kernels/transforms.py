"""What `jax.grad` and `jax.vmap` do with an op that has a kernel: the same on every platform.

Every such op's `api.py` runs its backends here. Serving differentiates nothing, and neither the
kernels nor the loops of the references, whose lengths only the device knows, have a reverse.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import sequential_vmap


def run_op(op: str, compute: Callable[..., Any], *arrays: Any) -> Any:
    """Calls `compute(*arrays)`, pytrees of arrays to such.

    `jax.vmap` of it calls it for one element after the other, in a loop on the device. Array
    arguments must be in `arrays`; what `compute` holds by itself is constant.

    Raises:
      NotImplementedError: it is differentiated, in whatever mode.
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

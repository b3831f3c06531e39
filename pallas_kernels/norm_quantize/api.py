"""RMSNorm and quantising its rows in one: checks the call, then runs the backend.

Called where rows are normed and leave in 8 bits. Knows nothing of where they go. Only Hopper GPUs
have a kernel (`mosaic_gpu.py`). On TPUs XLA works in the core's memory between two products, adds
up the squares as the product before is stored, and norms as the one after is loaded: there the
reference runs, as on everything else.
"""

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.norm_quantize import reference
from pallas_kernels.quantize import Format
from pallas_kernels.target import current_target


def rms_norm_quantize(
    x: Float[Array, "tokens d"], weight: Float[Array, " d"], epsilon: float, format: Format
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """RMSNorm of every row, as `rms_norm` does it, and that as `quantize_rows` quantises it.

    The kernel adds up the squares of a row in another order, so that the normed rows may differ by
    a step of their dtype. Values and scales are exactly those that `quantize_rows` makes of them.
    It covers a d that is a multiple of 128, up to 8192; the reference runs all others.

    Returns:
      the normed rows in x's dtype, which a router reads; their values in 8 bits, their scales.

    Raises:
      ValueError: the shapes or dtypes do not fit together, or the format is unknown.
    """
    if x.ndim != 2 or x.shape[1] == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{x.shape}, needs floats [tokens, d] with d > 0")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {weight.dtype}{weight.shape}, needs {x.dtype}({x.shape[1]},), as x has it"
        )
    if format not in get_args(Format):
        raise ValueError(f"format is {format!r}, needs one of {get_args(Format)}")
    target = current_target()
    if target.backend == "mosaic_gpu":
        from pallas_kernels.norm_quantize import mosaic_gpu

        return mosaic_gpu.rms_norm_quantize(x, weight, epsilon, format, target)
    return reference.rms_norm_quantize(x, weight, epsilon, format)

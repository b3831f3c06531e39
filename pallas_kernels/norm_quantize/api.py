"""RMSNorm fused with quantisation of its rows: checks the call, then runs the backend.

Called where normed rows are sent in 8 bits. Only Hopper GPUs have a kernel (`mosaic_gpu.py`). On
TPUs XLA fuses the norm into the surrounding products (it sums the squares as the previous product
is stored, and norms as the next one is loaded), so the reference runs there, as everywhere else.
"""

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.coverage import kernel_target
from pallas_kernels.norm_quantize import reference
from pallas_kernels.quantize import Format
from pallas_kernels.target import kernels
from pallas_kernels.transforms import run_op

OP = "rms_norm_quantize"
_COST = "reads the rows twice, in two or three launches"


def rms_norm_quantize(
    x: Float[Array, "tokens columns"],
    weight: Float[Array, " d"] | None,
    epsilon: float,
    format: Format,
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Norms the first d columns of every row as `rms_norm` does, and quantises them as
    `quantize_rows` does.

    The kernel sums the squares of a row in a different order, so normed rows may differ by one step
    of their dtype. Values and scales are exactly those of `quantize_rows` on these rows. The kernel
    supports multiples of 128 columns, up to 8192 that are normed, and up to 18432 that are not; on
    TPUs and for others plain XLA runs.

    Args:
      weight: None: all columns are quantised as they are.

    Returns:
      the normed rows in x's dtype (for a router), their 8-bit values, and their FP32 scales.

    Raises:
      ValueError: the shapes or dtypes do not fit together, or the format is unknown.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    if x.ndim != 2 or x.shape[1] == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{x.shape}, needs floats [tokens, d] with d > 0")
    if weight is not None and (
        weight.ndim != 1
        or not 0 < weight.shape[0] <= x.shape[1]
        or weight.dtype not in (x.dtype, jnp.float32)
    ):
        raise ValueError(
            f"weight is {weight.dtype}{weight.shape}, needs up to {x.shape[1]} numbers in float32 "
            "or x's dtype"
        )
    if format not in get_args(Format):
        raise ValueError(f"format is {format!r}, needs one of {get_args(Format)}")
    target = None
    if weight is None or weight.dtype == x.dtype:  # XLA norms by FP32 weights of other rows
        target = kernel_target(
            OP,
            lambda target: kernels("norm_quantize", target).gap(x, weight),
            _COST,
            fused_on_tpus=True,
        )

    def compute(x: Array, weight: Array | None) -> tuple[Array, Array, Array]:
        if target is None:
            return reference.rms_norm_quantize(x, weight, epsilon, format)
        return kernels("norm_quantize", target).rms_norm_quantize(
            x, weight, epsilon, format, target
        )

    return run_op(OP, compute, x, weight)

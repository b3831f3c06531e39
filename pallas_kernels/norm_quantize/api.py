"""RMSNorm fused with quantisation of its rows: checks the call, then runs the backend.

Called where normed rows are sent in 8 bits. Only Hopper GPUs have a kernel (`mosaic_gpu.py`). On
TPUs XLA fuses the norm into the surrounding products (it sums the squares as the previous product
is stored, and norms as the next one is loaded), so the reference runs there, as everywhere else.
"""

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.coverage import Implementation, kernel_target
from pallas_kernels.norm_quantize import reference
from pallas_kernels.quantize import Format
from pallas_kernels.target import kernels
from pallas_kernels.transforms import run_op
from pallas_kernels.tuned import Fields

OP = "rms_norm_quantize"
_COST = "reads the rows twice, in three launches"


def rms_norm_quantize(
    x: Float[Array, "tokens d"],
    weight: Float[Array, " d"],
    epsilon: float,
    format: Format,
    *,
    implementation: Implementation = "auto",
    tiles: Fields | None = None,
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Norms every row as `rms_norm` does, and quantises it as `quantize_rows` does.

    The kernel sums the squares of a row in a different order, so normed rows may differ by one step
    of their dtype. Values and scales are exactly those of `quantize_rows` on these rows. The kernel
    supports d_model up to 8192 in multiples of 128; on TPUs and for others plain XLA runs.

    Args:
      implementation: see `coverage.Implementation`; FP32 weights of other rows go to XLA.
      tiles: sizes that replace those of the device kind, by field (`pallas_kernels/README.md`).

    Returns:
      the normed rows in x's dtype (for a router), their 8-bit values, and their FP32 scales.

    Raises:
      ValueError: the shapes, dtypes or tiles do not fit together, or the format is unknown.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    if x.ndim != 2 or x.shape[1] == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{x.shape}, needs floats [tokens, d] with d > 0")
    if weight.shape != x.shape[1:] or weight.dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"weight is {weight.dtype}{weight.shape}, needs ({x.shape[1]},) in float32 or x's dtype"
        )
    if format not in get_args(Format):
        raise ValueError(f"format is {format!r}, needs one of {get_args(Format)}")
    fused = "norms, which XLA fuses there"
    if weight.dtype != x.dtype:
        implementation = "reference"
    target = kernel_target(
        OP,
        implementation,
        lambda target: kernels("norm_quantize", target).gap(x),
        _COST,
        tiles,
        fused_on_tpus=fused,
    )

    def compute(x: Array, weight: Array) -> tuple[Array, Array, Array]:
        if target is None:
            return reference.rms_norm_quantize(x, weight, epsilon, format)
        return kernels("norm_quantize", target).rms_norm_quantize(
            x, weight, epsilon, format, target, tiles
        )

    return run_op(OP, compute, x, weight)

"""Norms of real models to be compiled for Hopper: called by `gpu_resources.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_resources import Case
from pallas_kernels.norm_quantize.api import rms_norm_quantize
from pallas_kernels.quantize import Format

WIDTHS = {"qwen3_30b": 2048, "qwen3_235b": 4096, "step3": 7168, "widest": 8192}
"""Columns of a row. DeepSeek-V3 and Kimi K2 have Step-3's."""
FORMATS: dict[str, Format] = {"fp8": "fp8", "int8": "int8"}
DECODE, PREFILL = 128, 16384
"""Rows."""


def cases() -> list[Case]:
    """BF16 rows of every width, and one in FP32."""
    decode = [_case(name, format, DECODE) for name in WIDTHS for format in FORMATS]
    return [
        *decode,
        _case("step3", "fp8", PREFILL),
        _case("widest", "int8", DECODE, jnp.float32),
    ]


def _case(name: str, format: str, rows: int, dtype: Any = jnp.bfloat16) -> Case:
    width = WIDTHS[name]
    function = functools.partial(rms_norm_quantize, epsilon=1e-5, format=FORMATS[format])
    arguments = (
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((width,), dtype),
    )
    suffix = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype)}"
    return Case(f"{name} {format} {rows}{suffix}", function, arguments)

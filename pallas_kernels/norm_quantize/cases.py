"""Norms of real models, compiled for Hopper by `gpu_resources.py` and run by the bench."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case
from pallas_kernels.norm_quantize.api import rms_norm_quantize
from pallas_kernels.quantize import Format

WIDTHS = {"qwen3_30b": 2048, "qwen3_235b": 4096, "step3": 7168, "widest": 8192}
"""Columns of a row, by model. DeepSeek-V3 and Kimi K2 have the width of Step-3."""
DECODE, PREFILL = 128, 16384
"""Rows of a decode step and of a prefill step."""
FORMATS: dict[str, Format] = {"fp8": "fp8", "int8": "int8"}


def gpu_cases() -> list[Case]:
    """Returns BF16 rows of every width, one case in FP32, and Step-3's heads and the widest rows
    that are not normed."""
    decode = [_case(name, format, DECODE) for name in WIDTHS for format in FORMATS]
    return [
        *decode,
        _case("step3", "fp8", PREFILL),
        _case("widest", "int8", DECODE, jnp.float32),
        *(_quantised(columns) for columns in (16384, 18432)),
    ]


def _quantised(columns: int) -> Case:
    function = functools.partial(rms_norm_quantize, weight=None, epsilon=0.0, format="fp8")
    rows = jax.ShapeDtypeStruct((DECODE, columns), jnp.bfloat16)
    return Case(f"{columns} columns fp8 {DECODE}", function, (rows,))


def _case(name: str, format: str, rows: int, dtype: Any = jnp.bfloat16) -> Case:
    width = WIDTHS[name]
    function = functools.partial(rms_norm_quantize, epsilon=1e-5, format=FORMATS[format])
    arguments = (
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((width,), dtype),
    )
    suffix = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype)}"
    return Case(f"{name} {format} {rows}{suffix}", function, arguments)

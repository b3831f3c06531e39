"""Norms of real models to be compiled for Hopper: called by `gpu_resources.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case
from pallas_kernels.norm_quantize.api import rms_norm_quantize
from pallas_kernels.norm_quantize.shapes import DECODE, PREFILL, WIDTHS
from pallas_kernels.quantize import Format

FORMATS: dict[str, Format] = {"fp8": "fp8", "int8": "int8"}


def gpu_cases() -> list[Case]:
    """Returns BF16 rows of every width, and one case in FP32."""
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

"""Decode steps of real models to be compiled: called by `aot.py` and `gpu_resources.py`."""

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Case, Loop
from pallas_kernels.gated_delta.api import delta_step

SEQUENCES, POOL, KEY_HEADS, WIDTH = 64, 128, 16, 128
HEADS = {"qwen3-next": 32, "qwen3.5-397b": 64}
"""Value heads of each model; devices that divide a model have a part of them."""


def cases(_: str) -> list[Case]:
    """Returns the step of every model, and of an eighth of the first model's heads."""
    whole = [_case(name, KEY_HEADS, heads) for name, heads in HEADS.items()]
    return [*whole, _case("qwen3-next / 8", KEY_HEADS // 8, HEADS["qwen3-next"] // 8)]


def gpu_cases() -> list[Case]:
    """Returns the same cases for Hopper."""
    return cases("h200")


def _case(name: str, key_heads: int, heads: int) -> Case:
    def rows(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((SEQUENCES, *sizes), jnp.float32)

    states = jax.ShapeDtypeStruct((POOL, heads, WIDTH, WIDTH), jnp.float32)
    page = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32)
    keys, factors = rows(key_heads, WIDTH), rows(heads)
    size = 2 * heads * WIDTH * WIDTH * states.dtype.itemsize
    loop = Loop(kernel="delta_step", unit="sequence", units=1, copies=1, bytes_per_unit=size)
    arguments = (states, page, keys, keys, rows(heads, WIDTH), factors, factors)
    return Case(name, delta_step, arguments, (0,), loop)

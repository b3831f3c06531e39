"""RMSNorm with quantisation at real widths: inputs, counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.quantize import Format

EPSILON = 1e-5
FORMATS: tuple[Format, ...] = ("fp8", "int8")


class Step(NamedTuple):
    """One norm of a device's rows."""

    d_model: int
    format: Format
    tokens: int

    def bytes(self) -> int:
        """Bytes read and written: BF16 rows, normed rows, their 8-bit values, and a scale each."""
        return self.tokens * (5 * self.d_model + 4) + 2 * self.d_model

    def flops(self) -> int:
        """Squares and their sum, two factors, the largest magnitude, the scale."""
        return 6 * self.tokens * self.d_model


def inputs(step: Step) -> tuple[Any, ...]:
    """Returns rows and the weight of the norm."""
    rows, weight = jax.random.split(jax.random.key(0))
    shape = (step.tokens, step.d_model)
    return (
        jax.random.normal(rows, shape, jnp.bfloat16),
        jax.random.uniform(weight, shape[1:], jnp.bfloat16, 0.5, 2.0),
    )


def call(step: Step, op: Callable[..., Any] = rms_norm_quantize) -> Callable[..., Any]:
    """Returns the measured function. It returns the values in 8 bits, but computes all results."""

    def run(rows: Any, weight: Any) -> Any:
        found = op(rows, weight, EPSILON, step.format)
        return lax.optimization_barrier(found)[1]

    return run


def checked(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments for the rows that are checked: all rows."""
    return arguments

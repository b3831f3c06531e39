"""Compares a result with the reference's on the same inputs. Called by the bench and the tuner."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.target import Target, use_target

TOLERANCE = {"bf16": 0.02, "int8": 0.04, "int8_rows": 0.04, "int8_float": 0.02}
TOLERANCE |= dict.fromkeys(("fp8", "fp8_block", "fp8_block_rows"), 0.06)
"""Largest ‖result − reference‖ / ‖reference‖, by format."""


def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Runs the function with a fresh trace, since JAX's trace caches ignore targets and tiles."""

    def fresh(*arguments: Any) -> Any:
        return function(*arguments)

    return jax.jit(fresh)(*arguments)


def expected(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Runs the reference."""
    with use_target(Target("reference", "cpu")):
        return run(function, arguments)


def distance(output: Any, right: Any) -> float:
    """Returns the relative distance; of the last rows if `output` has more than `right`."""
    output = output[-right.shape[0] :]
    got, wanted = (np.asarray(array.astype(jnp.float32)) for array in (output, right))
    found = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return found if np.isfinite(found) else 1e30

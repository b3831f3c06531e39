"""Computes a kernel's plan at compile time where its inputs are compile-time constants. Called by
kernels' plans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def when_known(plan: Callable[..., Any], sizes: jax.Array | np.ndarray, *rest: int | bool) -> Any:
    """Calls `plan(sizes, *rest)`. For sizes in NumPy the result is in NumPy too: constants of the
    program instead of computations at run time."""
    if not isinstance(sizes, np.ndarray):
        return plan(sizes, *rest)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, plan(jnp.asarray(sizes), *rest))

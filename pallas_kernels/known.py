"""Computes a kernel's plan at compile time where its inputs are compile-time constants. Called by
kernels' plans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.coverage import collects_fallbacks


def when_known(plan: Callable[..., Any], sizes: jax.Array | np.ndarray, *rest: int | bool) -> Any:
    """Calls `plan(sizes, *rest)`. For sizes in NumPy the result is in NumPy too: constants of the
    program instead of computations at run time. For a program that will not run nothing is
    computed, since that would start a backend."""
    if not isinstance(sizes, np.ndarray) or collects_fallbacks():
        return plan(jnp.asarray(sizes), *rest)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, plan(jnp.asarray(sizes), *rest))

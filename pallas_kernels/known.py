"""What is known when a call is compiled is computed then. Called by kernels' plans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def when_known(plan: Callable[..., Any], sizes: jax.Array | np.ndarray, *rest: int) -> Any:
    """`plan(sizes, *rest)`; of sizes in NumPy, its arrays are NumPy's, too: constants, that no
    program computes again."""
    if not isinstance(sizes, np.ndarray):
        return plan(sizes, *rest)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, plan(jnp.asarray(sizes), *rest))

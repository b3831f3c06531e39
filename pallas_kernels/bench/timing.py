"""Times of a function on the device, and the rates of a copy and of a dense product there.

Called by the bench. Iterations are chained inside one jitted loop, each waiting for the one before,
so that launching from the host is not measured. Knows no op.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Effort(NamedTuple):
    """How long to measure: iterations in a loop, and rounds of which the median counts."""

    iterations: int
    rounds: int


def timed(
    function: Callable[..., Any], effort: Effort, first: Any, *rest: Any
) -> tuple[float, Any]:
    """Returns the median seconds of one call, and the result of the last one.

    Args:
      first: a small float array. Every iteration reads it and writes it again, unchanged, so that
        the next one waits.
    """
    loop = jax.jit(functools.partial(repeated, function, effort.iterations))
    seconds = _median(lambda: loop(first, *rest), effort)
    return seconds, loop(first, *rest)[1]


def _median(loop: Callable[[], Any], effort: Effort) -> float:
    """Median seconds of an iteration of a compiled loop, after a round that compiles."""
    times = []
    for _ in range(1 + effort.rounds):
        start = time.perf_counter()
        jax.block_until_ready(loop())
        times.append((time.perf_counter() - start) / effort.iterations)
    return float(np.median(times[1:]))


def repeated(function: Callable[..., Any], iterations: int, first: Any, *rest: Any) -> Any:
    """Calls the function `iterations` times, one call after the other; `timed` times this. The
    barriers keep XLA from computing the parts that depend on `rest` alone once, before the loop."""

    def body(_: Any, carry: Any) -> Any:
        inputs = lax.optimization_barrier((carry[0], *rest))
        value = lax.optimization_barrier(function(*inputs))
        return carry[0] + (0 * value.reshape(-1)[0]).astype(first.dtype), value

    result = jax.eval_shape(function, first, *rest)
    empty = jnp.zeros(result.shape, result.dtype)
    return lax.fori_loop(0, iterations, body, (first, empty))


def copy_rate(size: int, effort: Effort) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes that changes every element."""
    array = jnp.ones(size // 4, jnp.float32)

    @jax.jit
    def loop(array: Any) -> Any:
        return lax.fori_loop(0, effort.iterations, lambda _, a: lax.optimization_barrier(-a), array)

    return 2 * array.nbytes / _median(lambda: loop(array), effort)


def dense_rate(width: int, effort: Effort) -> float:
    """FLOP a second of a square BF16 product; of random numbers, as those of the ops are: units
    that multiply constants need less power, and clock higher."""
    left, right = jax.random.normal(jax.random.key(0), (2, width, width), jnp.bfloat16)
    return 2 * width**3 / timed(jnp.matmul, effort, left, right)[0]

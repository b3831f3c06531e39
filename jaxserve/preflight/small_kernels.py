"""Runs an engine's smaller operations on this device and on the CPU, and compares the results.

Started by `kernels.py` in a process of its own, as `python -m jaxserve.preflight.small_kernels
FILE`. The operations are the writing of caches, the sorting of choices, norms, routers, products'
quantised rows and the sampler, at sizes of real models. The CPU computes their definitions.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model.sampler import SamplerState, sample_and_largest
from pallas_kernels import small_ops
from pallas_kernels.bench import correctness
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.rotate_and_write import cases

NEAR = 0.02
"""Largest ‖device − CPU‖ / ‖CPU‖ of floats. Of integers that are not 0, the part that may differ:
choices where scores are nearly equal; numbers in 8 bits may all be off by one."""
PLAIN = ("norm and quantise", "route deepseek-v3", "route step3", "permute")
"""Operations of `small_ops` whose results are numbers, not bytes of a message."""
SLOTS, VOCAB = 32, 32768

Operation = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""Name, function and arguments of an operation. Arguments may be shapes without numbers."""


def operations() -> list[Operation]:
    """Returns everything that is compared."""
    found: list[Operation] = [
        (f"rotate_and_write {name}", function, jax.tree.map(_cut, arguments))
        for name, function, arguments, *_ in cases.gpu_cases()
    ]
    small = small_ops.small_ops()
    found += [(one.name, one.function, one.arguments) for one in small if one.name in PLAIN]
    rows = jax.ShapeDtypeStruct((small_ops.TOKENS, small_ops.D_MODEL), jnp.bfloat16)
    for form in ("int8", "fp8"):
        found.append((f"quantise {form}", functools.partial(quantize_rows, format=form), (rows,)))
    slot = jnp.arange(SLOTS)
    temperature, top_p = jnp.where(slot % 4 > 0, 0.7, 0.0), jnp.where(slot % 2 > 0, 1.0, 0.9)
    top_k, seed = jnp.where(slot % 3 > 0, 0, 40), slot.astype(jnp.uint32)
    state = SamplerState(temperature, top_k, top_p, jnp.zeros(SLOTS), seed, 7 * slot)
    logits = jax.ShapeDtypeStruct((SLOTS, VOCAB), jnp.float32)
    return [
        *found,
        ("sampler", functools.partial(sample_and_largest, vocab=VOCAB), (logits, state)),
    ]


def _cut(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns pages for the first two of every sequence, and such a page table."""
    shape = array.shape
    if shape[0] == cases.PAGES:
        shape = (2 * cases.TOKENS, *shape[1:])
    elif array.dtype == jnp.int32 and len(shape) == 2:
        shape = shape[0], 2
    return jax.ShapeDtypeStruct(shape, array.dtype)


def filled(shape: Any) -> Any:
    """Returns numbers for a shape: random floats, counted integers, zeros in 8 bits."""
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    size = math.prod(shape.shape)
    values = np.random.default_rng(size).normal(size=size)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        values = np.arange(size) * (shape.dtype == jnp.int32)
    return values.reshape(shape.shape).astype(shape.dtype)


def distance(found: Any, right: Any) -> float:
    """Returns the largest distance of two trees of arrays; see `NEAR`."""
    worst = 0.0
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        a, b = (np.asarray(array).astype(np.float64) for array in (got, wanted))
        apart = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
        if jnp.issubdtype(wanted.dtype, jnp.integer):
            off = wanted.dtype.itemsize == 1
            apart = np.sum(np.abs(a - b) > off) / max(1, np.count_nonzero(b))
        worst = max(worst, float(apart) if np.isfinite(apart) else 1e30)
    return worst


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares everything, and writes the results in the form of `pallas_kernels.bench`."""
    (file,) = sys.argv[1:] if arguments is None else arguments
    results = []
    for name, function, shapes in operations():
        given = jax.tree.map(filled, shapes)
        found = correctness.run(function, given)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            error = distance(found, correctness.expected(function, given))
        results.append({"case": name, "format": "", "error": error, "correct": error <= NEAR})
    Path(file).write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    main()

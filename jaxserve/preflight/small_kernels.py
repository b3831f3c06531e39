"""Runs an engine's smaller operations on this device and on the CPU, and compares the results.

Started by `kernels.py` in a process of its own, as `python -m jaxserve.preflight.small_kernels
FILE`. The operations are the writing of caches, the sorting of choices, norms, routers and the
sampler, at sizes of real models. The CPU computes their definitions in plain XLA.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model.sampler import SamplerState, sample_and_largest
from pallas_kernels import small_ops
from pallas_kernels.bench import correctness
from pallas_kernels.quantize import quantize_rows
from pallas_kernels.rotate_and_write import gpu_cases

NEAR = 0.02
"""Largest ‖device − CPU‖ / ‖CPU‖ of floats. Of integers that are not 0, the part that may differ:
choices where scores are nearly equal; numbers in 8 bits may all be off by one."""
PLAIN = ("norm and quantise", "route deepseek-v3", "route step3", "permute")
"""Operations of `small_ops` whose results are numbers, not bytes of a message."""
SLOTS, VOCAB = 32, 32768


class Operation(NamedTuple):
    """An operation and its arguments, some of them shapes alone."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def operations() -> list[Operation]:
    """Returns everything that is compared."""
    found = [
        Operation(f"rotate_and_write {name}", function, jax.tree.map(_cut, arguments))
        for name, function, arguments in gpu_cases.cases()
    ]
    found += [
        Operation(one.name, one.function, one.arguments)
        for one in small_ops.small_ops()
        if one.name in PLAIN
    ]
    rows = jax.ShapeDtypeStruct((small_ops.TOKENS, small_ops.D_MODEL), jnp.bfloat16)
    found += [
        Operation(f"quantise {form}", lambda x, form=form: quantize_rows(x, form), (rows,))
        for form in ("int8", "fp8")
    ]
    slot = jnp.arange(SLOTS)
    state = SamplerState(
        temperature=jnp.where(slot % 4 > 0, 0.7, 0.0),
        top_k=jnp.where(slot % 3 > 0, 0, 40),
        top_p=jnp.where(slot % 2 > 0, 1.0, 0.9),
        min_p=jnp.zeros(SLOTS),
        seed=slot.astype(jnp.uint32),
        position=7 * slot,
    )
    logits = jax.ShapeDtypeStruct((SLOTS, VOCAB), jnp.float32)
    sampled = lambda logits, state: sample_and_largest(logits, state, VOCAB)  # noqa: E731
    return [*found, Operation("sampler", sampled, (logits, state))]


def _cut(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns pages for the first two of every sequence, and such a page table."""
    shape = array.shape
    if shape[0] == gpu_cases.PAGES:
        shape = (2 * gpu_cases.TOKENS, *shape[1:])
    elif array.dtype == jnp.int32 and len(shape) == 2:
        shape = shape[0], 2
    return jax.ShapeDtypeStruct(shape, array.dtype)


def filled(shape: Any) -> Any:
    """Returns numbers for an argument that is a shape alone: random floats, counted integers, zeros
    in 8 bits."""
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    size = math.prod(shape.shape)
    values = np.random.default_rng(size).normal(size=size)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        values = np.arange(size) if shape.dtype == jnp.int32 else np.zeros(size)
    return values.reshape(shape.shape).astype(shape.dtype)


def distance(found: Any, right: Any) -> float:
    """Returns the largest distance of two trees of arrays; see `NEAR`."""
    worst = 0.0
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        a, b = (np.asarray(array) for array in (got, wanted))
        whole, off = jnp.issubdtype(b.dtype, jnp.integer), int(b.dtype.itemsize == 1)
        a, b = a.astype(np.float64), b.astype(np.float64)
        apart = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
        if whole:
            apart = np.sum(np.abs(a - b) > off) / max(1, np.count_nonzero(b))
        worst = max(worst, float(apart) if np.isfinite(apart) else 1e30)
    return worst


def compare(one: Operation) -> dict[str, Any]:
    """Returns the result of an operation, in the form of `pallas_kernels.bench`."""
    arguments = jax.tree.map(filled, one.arguments)
    found = correctness.run(one.function, arguments)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        error = distance(found, correctness.expected(one.function, arguments))
    return {"case": one.name, "format": "", "error": error, "correct": error <= NEAR}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares everything and writes the results into the file."""
    (file,) = sys.argv[1:] if arguments is None else arguments
    Path(file).write_text(json.dumps({"results": [compare(one) for one in operations()]}))


if __name__ == "__main__":
    main()

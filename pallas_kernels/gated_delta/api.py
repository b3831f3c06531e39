"""One token of Gated DeltaNet for each of many sequences: checks the call, runs the backend.

Called by the model's Gated DeltaNet layers for sequences with one token in a step. The states are
nearly all the bytes of such a layer. The kernels read each state once and write it once, in place.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.coverage import kernel_target
from pallas_kernels.gated_delta import reference
from pallas_kernels.gated_delta.reference import Step
from pallas_kernels.target import kernels
from pallas_kernels.transforms import run_op

OP = "delta_step"
_COST = "reads and writes each state three times"


def delta_step(
    states: Float32[Array, "pool heads key_dim value_dim"],
    page: Int32[Array, " rows"],
    query: Float32[Array, "rows key_heads key_dim"],
    key: Float32[Array, "rows key_heads key_dim"],
    value: Float32[Array, "rows heads value_dim"],
    decay: Float32[Array, "rows heads"],
    rate: Float32[Array, "rows heads"],
) -> tuple[Float32[Array, "pool heads key_dim value_dim"], Float32[Array, "rows heads value_dim"]]:
    """Feeds one token to the state of each sequence (arXiv 2412.06464, equation 10), and reads the
    state with the token's query:

        S ← e^decay·S;  S ← S + key·(rate·(value − Sᵀkey))ᵀ;  result = Sᵀquery

    The states change in place if the caller donates them. Consecutive value heads share a key head.

    Args:
      page: index of the sequence's states. No two rows share one. Rows with an index behind the
        pool change nothing, come last, and have undefined results.
      decay: logarithm of the state's factor. With −inf the state begins with zeros, whatever the
        page holds.
      rate: share of the state's old value that the token replaces (β).

    Returns:
      the states, and what each token reads.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    step = Step(states, page, query, key, value, decay, rate)
    _check(step)
    target = kernel_target(OP, lambda target: kernels("gated_delta", target).gap(step), _COST)

    def compute(step: Step) -> tuple[Array, Array]:
        if target is None or not len(step.page):
            return reference.delta_step(step)
        return kernels("gated_delta", target).delta_step(step, target)

    return run_op(OP, compute, step)


def _check(step: Step) -> None:
    """Raises ValueError for shapes and dtypes that do not fit together."""
    (rows, key_heads, key_dim), (heads, value_dim) = step.key.shape, step.value.shape[1:]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"value has {heads} heads, needs a multiple of the {key_heads} of key")
    of_keys, of_heads, int32 = (rows, key_heads, key_dim), (rows, heads), jnp.dtype(jnp.int32)
    wanted = {"page": (rows,), "query": of_keys, "key": of_keys, "value": (*of_heads, value_dim)}
    wanted |= {"states": (len(step.states), heads, key_dim, value_dim)}
    for name, shape in (wanted | {"decay": of_heads, "rate": of_heads}).items():
        array, dtype = getattr(step, name), int32 if name == "page" else jnp.dtype(jnp.float32)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, needs {dtype}{shape}")

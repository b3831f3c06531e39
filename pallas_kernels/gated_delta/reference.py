"""Definition of Gated DeltaNet's recurrence in plain JAX, which runs where no kernel exists."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float32, Int32


class Step(NamedTuple):
    """One token of each of several sequences, and the states of all sequences."""

    states: Float32[Array, "pool heads key_dim value_dim"]
    page: Int32[Array, " rows"]
    query: Float32[Array, "rows key_heads key_dim"]
    key: Float32[Array, "rows key_heads key_dim"]
    value: Float32[Array, "rows heads value_dim"]
    decay: Float32[Array, "rows heads"]
    rate: Float32[Array, "rows heads"]


def delta_step(
    step: Step,
) -> tuple[Float32[Array, "pool heads key_dim value_dim"], Float32[Array, "rows heads value_dim"]]:
    """Computes `api.delta_step`. XLA reads and writes each state several times."""
    states, page, query, key, value, decay, rate = step
    group = value.shape[1] // key.shape[1]
    query, key = (jnp.repeat(each, group, axis=1) for each in (query, key))
    factor = jnp.exp(decay)[..., None, None]
    held = jnp.where(factor > 0, states.at[page].get(mode="clip") * factor, 0)

    def seen_by(row: Array, held: Array) -> Array:
        return jnp.einsum("nhk,nhkv->nhv", row, held, precision=Precision.HIGHEST)

    change = rate[..., None] * (value - seen_by(key, held))
    held += key[..., None] * change[..., None, :]
    return states.at[page].set(held, mode="drop"), seen_by(query, held)

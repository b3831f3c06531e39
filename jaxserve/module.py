"""What the modules of both roles share: weights with named dimensions, linear maps, RMSNorm.

Modules are `flax.nnx` modules that hold global (unsharded) shapes; a program gets the sharded
leaves and `nnx.merge`s them inside `shard_map`, where every module sees its device's slices. Sits
below `attention/` and `ffn/` and knows neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.mesh import Rules, partition_spec


class Weight(nnx.Param):
    """A parameter whose metadata `dimensions` names its axes for the sharding rules."""


def weight(rngs: nnx.Rngs, dtype: jnp.dtype, **dimensions: int) -> Weight:
    """A normal-initialised weight; keyword order gives the axes, `d_in` last but one scales it.

    A trailing underscore in a name keeps two equal dimensions apart (`d_model`, `d_model_`).
    """
    shape = tuple(dimensions.values())
    fan_in = shape[-2] if len(shape) > 1 else 1
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return Weight(value.astype(dtype), dimensions=_names(dimensions))


def scale(dtype: jnp.dtype, **dimensions: int) -> Weight:
    """A norm's weight, one everywhere."""
    return Weight(jnp.ones(tuple(dimensions.values()), dtype), dimensions=_names(dimensions))


def _names(dimensions: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
    return tuple(name.rstrip("_") for name in dimensions)


def linear(
    x: Float[Array, "tokens d_in"], w: Float[Array, "d_in d_out"]
) -> Float[Array, "tokens d_out"]:
    """x · w with FP32 accumulation, in x's dtype (FP32 inputs: FP32 products on every platform)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def rms_norm(
    x: Float[Array, "tokens d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "tokens d"]:
    """RMSNorm in FP32, cast back to x's dtype, times the weight."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * weight


class Template:
    """A module without arrays: its structure, and the name, shape and dimensions of every leaf.

    Programs rebuild the module from flat leaves, the loader fills the leaves, the driver passes
    them: all three in the same order.

    Attributes:
      names: dotted path of each leaf.
      leaves: shape and dtype of each leaf, global.
      dimensions: the axis names of each leaf.
    """

    def __init__(self, build: Callable[[nnx.Rngs], nnx.Module]):
        self._build = build
        graph, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        flat = nnx.to_flat_state(state)
        self._graph = graph
        self._paths = [path for path, _ in flat]
        variables = [variable for _, variable in flat]
        self.names = tuple(".".join(map(str, path)) for path in self._paths)
        self.leaves: tuple[jax.ShapeDtypeStruct, ...] = tuple(v.get_value() for v in variables)
        self.dimensions: tuple[tuple[str, ...], ...] = tuple(
            v.get_metadata("dimensions") for v in variables
        )
        self._variables = variables

    def merge(self, leaves: Sequence[Array]) -> Any:
        """The module with these leaves (global or one device's slices)."""
        flat = [
            (path, variable.replace(leaf))
            for path, variable, leaf in zip(self._paths, self._variables, leaves, strict=True)
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def specs(self, rules: Rules) -> tuple[PartitionSpec, ...]:
        """The partition spec of every leaf."""
        return tuple(partition_spec(names, rules) for names in self.dimensions)

    def random(self, seed: int) -> list[Array]:
        """Random leaves, for benches and tests that need no checkpoint."""
        _, state = nnx.split(self._build(nnx.Rngs(seed)))
        return [variable.get_value() for _, variable in nnx.to_flat_state(state)]

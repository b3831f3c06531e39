"""Building blocks of both roles' modules: weights with named dimensions, linear maps, RMSNorm.

Modules are flax's (`nnx`) and have global (unsharded) shapes; a program gets the sharded leaves and
puts them in their places inside `shard_map`, where every module sees its device's slices
(`Template`). Sits below `attention/` and `ffn/` and knows neither.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.config.formats import StoredFormat, group_of, sharing
from jaxserve.config.model import Int4
from jaxserve.errors import ConfigError
from jaxserve.mesh import AnyMesh, Rules, partition_spec, placed
from pallas_kernels.grouped_matmul.dense import matmul, normed_matmul
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.input_major import InputMajor, in_tiles, width_of
from pallas_kernels.norm_quantize import rms_norm as rms_norm
from pallas_kernels.quantize import QuantArray, StackEntry, WeightFormat, quantize_weight
from pallas_kernels.target import by_platform

BLOCK = 128
"""Rows and columns that share a scale in `fp8_block` (DeepSeek-V3 §3.3.2)."""


LEAST_GROUP = 16
"""Fewest columns that share a scale in INT4; with fewer the scales take as much as INT8."""


@dataclasses.dataclass(frozen=True)
class Formats:
    """The number formats of a role's modules.

    Attributes:
      dtype: dtype of activations, norms and everything that is not quantised.
      weights: storage format of the matrices that `matrix` makes.
      shards: number of shards of a dimension on the role's mesh, by name; 1 where missing.
      expert_rows: the `row_format` of routed experts, as `grouped_matmul` takes it; "float": also
        of a whole shared expert.
      int4: how INT4 matrices are scaled; MXFP4 has groups of its own.
      dense: storage format of dense FFNs and the shared expert, where it is another one.
      input_major: whether float matrices lie in tiles, input by input, as CPUs multiply them.
      floats: dtype of float matrices, where it is another one than `dtype`.
      float32_norms: whether weights of norms are FP32: 1 + w of BF16 checkpoints.
      output: `attention.output`; with "whole" columns of `out_heads` are divided as `q_heads`.
    """

    dtype: jnp.dtype
    weights: StoredFormat = "plain"
    shards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    expert_rows: RowFormat | None = None
    int4: Int4 = dataclasses.field(default_factory=Int4)
    dense: StoredFormat | None = None
    input_major: bool = False
    floats: jnp.dtype | None = None
    float32_norms: bool = False
    output: Literal["whole", "split"] = "whole"

    @property
    def norms(self) -> jnp.dtype:
        """Dtype of the weights of norms."""
        return jnp.dtype(jnp.float32) if self.float32_norms else self.dtype


WeightKind = Literal["plain", "input_major", "quantised"]


class Weight(nnx.Param[Any]):
    """A parameter.

    Its value is the whole array or one device's slice; in a template its shape and dtype.

    Args:
      dimensions: names of the axes for the sharding rules.
      kind: "input_major": a matrix or a stack of matrices in the layout of `InputMajor`;
        "quantised": a part of a `QuantWeight`.
    """

    def __init__(
        self, value: Any, dimensions: tuple[str | None, ...] = (), kind: WeightKind = "plain"
    ):
        super().__init__(value, dimensions=dimensions, kind=kind)

    def __getitem__(self, key: Any) -> Any:
        """Returns the array in the form that products take, for `[...]`."""
        value = self.get_raw_value()
        if self.kind == "input_major" and not isinstance(value, InputMajor):
            return InputMajor(value)
        return value

    def by_inputs(self, shards: Mapping[str, int]) -> "Weight":
        """Returns the matrix or stack in the layout of `InputMajor`; no tile spans two devices."""
        *outer, d_out, d_in = self.dimensions
        width = width_of(self.shape[-2] // shards.get(d_out or "", 1))
        tiles = _made_of(self.get_raw_value(), in_tiles, width)
        return Weight(tiles, (*outer, d_out, d_in, None), "input_major")


class QuantWeight(nnx.Module):
    """A matrix in 8 or 4 bits, or a stack of them, with its scales.

    Attributes:
      values: [..., d_out, d_in].
      scales: one per block; FP32, of MXFP4 powers of two.
      zeros: INT8, one per block; None without zero points.
      block: (rows, columns) that share a scale; 0 means the whole axis.
    """

    def __init__(
        self,
        value: Array | jax.ShapeDtypeStruct,
        weights: WeightFormat,
        block: tuple[int, int],
        dimensions: tuple[str, ...],
        *,
        zero_points: bool = False,
    ):
        quantised = _made_of(value, quantize_weight, weights, block)
        *outer, d_out, d_in = dimensions
        self.block = block
        self.values = Weight(quantised.values, dimensions, "quantised")
        of_blocks = (*outer, d_out, d_in if block[1] else None)
        self.scales = Weight(quantised.scales, of_blocks, "quantised")
        points = _made_of(quantised.scales, jnp.zeros_like, jnp.int8)
        self.zeros = Weight(points, of_blocks, "quantised") if zero_points else None

    def __getitem__(self, key: EllipsisType) -> QuantArray:
        """Returns the matrix in the form that products take, for `[...]`."""
        zeros = None if self.zeros is None else self.zeros[...]
        return QuantArray(self.values[...], self.scales[...], self.block, zeros)


def _made_of(value: Any, make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function makes of a matrix or of each one of a stack; of a shape, shapes."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return make(value, *arguments)
    matrix = jax.ShapeDtypeStruct(value.shape[-2:], value.dtype)
    stack, one = value.shape[:-2], _shapes(make, matrix, *arguments)
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct((*stack, *part.shape), part.dtype), one)


@functools.lru_cache(4096)
def _shapes(make: Callable[..., Any], matrix: jax.ShapeDtypeStruct, *arguments: Any) -> Any:
    return jax.eval_shape(lambda value: make(value, *arguments), matrix)


def _filled(rngs: nnx.Rngs, dtype: jnp.dtype, sizes: dict[str, int], fill: Any) -> Weight:
    """Makes a weight by `fill`, which takes a shape and a dtype; without values if `rngs` has no
    streams (`Template`)."""
    shape = tuple(sizes.values())
    value = fill(shape, dtype) if len(rngs) else jax.ShapeDtypeStruct(shape, dtype)
    return Weight(value, dimensions=_names(sizes))


def weight(rngs: nnx.Rngs, dtype: jnp.dtype, **dimensions: int) -> Weight:
    """Makes a weight with normally distributed values of standard deviation 1/√(last axis). The
    keywords name the axes, in order.

    A trailing underscore in a name keeps two equal dimensions apart (`d_model`, `d_model_`).
    """

    def normal(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
        return value.astype(dtype)

    return _filled(rngs, dtype, dimensions, normal)


def matrix(rngs: nnx.Rngs, formats: Formats, **dimensions: int) -> Weight | QuantWeight:
    """Makes a matrix [..., d_out, d_in] of a linear map in the role's format.

    The contracted axis comes last, as in checkpoints (loading is then a plain read) and as tensor
    cores require for 8-bit operands.
    """
    return side_by_side(rngs, formats, (), **dimensions)


def side_by_side(
    rngs: nnx.Rngs, formats: Formats, parts: Sequence[int], **dimensions: int
) -> Weight | QuantWeight:
    """Makes the matrices of several linear maps, concatenated along d_out.

    Args:
      parts: d_out of each map; scale blocks do not span two maps.

    Raises:
      ConfigError: the devices that divide the matrix do not divide its columns.
    """
    if formats.output == "whole":
        dimensions = {name.replace("out_heads", "q_heads"): n for name, n in dimensions.items()}
    elif (size := dimensions.get("out_heads")) and size % (over := formats.shards["out_heads"]):
        raise ConfigError(f"attention.output = split: {over} devices do not divide {size} columns")
    floats = (formats.weights == "plain" and formats.floats) or formats.dtype
    plain = weight(rngs, floats, **dimensions)
    if formats.weights == "plain":
        return plain.by_inputs(formats.shards) if formats.input_major else plain
    names = _names(dimensions)
    shared, block, zero_points = sharing(formats.weights), (1, 0), False
    if shared == "group":
        axis = list(dimensions)[-1]
        shards = formats.shards.get(axis.rstrip("_"), 1)
        own = group_of(formats.weights)
        group = _block(dimensions[axis], shards, own or formats.int4.group)
        least = own or LEAST_GROUP
        if group < least:
            raise ConfigError(
                f"{formats.weights.upper()} weights: {axis.rstrip('_')} = {dimensions[axis]} over "
                f"{shards} devices: a scale for {group} columns each; needs a multiple of {least} "
                "on each"
            )
        block, zero_points = (1, group), not own and formats.int4.zero_points
    elif shared == "block":
        d_out, d_in = (
            _block(dimensions[name], formats.shards.get(name.rstrip("_"), 1))
            for name in list(dimensions)[-2:]
        )
        block = (math.gcd(d_out, *parts[:-1]), d_in)
    return QuantWeight(plain[...], formats.weights, block, names, zero_points=zero_points)


def _block(size: int, shards: int, most: int = BLOCK) -> int:
    """Returns the block size of an axis: small enough that no block spans two devices."""
    return most if shards == 1 else math.gcd(most, size // shards)


def zeros(rngs: nnx.Rngs, dtype: jnp.dtype, **dimensions: int) -> Weight:
    """Makes a bias, zero everywhere."""
    return _filled(rngs, dtype, dimensions, jnp.zeros)


def scale(rngs: nnx.Rngs, dtype: jnp.dtype, **dimensions: int) -> Weight:
    """Makes a norm's weight, one everywhere."""
    return _filled(rngs, dtype, dimensions, jnp.ones)


def _names(dimensions: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
    return tuple(name.rstrip("_") for name in dimensions)


Norm = tuple[Float[Array, " d"], float]
"""Weight and epsilon of an RMSNorm."""


def linear(
    x: Float[Array, "tokens d_in"],
    w: Weight | QuantWeight,
    bias: Weight | None = None,
    *,
    norm: Norm | None = None,
) -> Float[Array, "tokens d_out"]:
    """Computes x · w with FP32 accumulation, plus the bias, in x's dtype; with a norm, that of x's
    first columns · w.

    Of an output projection that all devices divide (`attention.output: split`), x is a token's
    heads: they go to the devices of their columns in other DP groups, and sums come back. Attention
    stays data-parallel, so that no cache is stored twice (xDeepServe, figure 10).
    """
    if "out_heads" in (w if isinstance(w, Weight) else w.values).dimensions:
        x = jax.lax.all_to_all(x, "dp", split_axis=1, concat_axis=0, tiled=True)
        return jax.lax.psum_scatter(matmul(x, w[...]), "dp", tiled=True)
    product = matmul(x, w[...]) if norm is None else normed_matmul(x, norm, w[...])
    if bias is not None:
        product += bias[...].astype(jnp.float32)
    return product.astype(x.dtype)


def add_once(share: Float[Array, "tokens d"], bias: Weight | None) -> Float[Array, "tokens d"]:
    """Adds the bias to this device's summand of a sum over `tp`, on the first device alone."""
    if bias is None:
        return share
    return share + jnp.where(jax.lax.axis_index("tp") == 0, bias[...], 0)


def all_columns(own: Float[Array, "rows own"], count: int) -> Float[Array, "rows count"]:
    """Gathers the columns of embeddings or logits of all `tp` devices, and drops the padding behind
    them. Returns the input where it already has `count` columns. XLA:CPU lays out a gather along
    columns column by column: to gather [devices, rows, columns] saves two transpositions."""
    if own.shape[1] == count:
        return own

    def by_rows(own: Array) -> Array:
        return jnp.swapaxes(jax.lax.all_gather(own, "tp"), 0, 1).reshape(own.shape[0], -1)

    along = functools.partial(jax.lax.all_gather, axis_name="tp", axis=1, tiled=True)
    every: Array = by_platform(own, cpu=by_rows, default=along)
    return every[:, :count]


class AppendedPart(NamedTuple):
    """Entries of a leaf's first axis behind those of the checkpoint's array: equal parts of another
    matrix of the checkpoint."""

    name: str
    """Path of that matrix."""
    pieces: int
    """Number of parts that the matrix is divided into."""
    axis: int
    """Axis that is divided."""


class TemplateLeaf(jax.ShapeDtypeStruct):
    """An array of a module without its values: its global shape and dtype.

    Attributes:
      name: dotted path in the module.
      dimensions: the names of its axes.
      input_major: whether it lies tile by tile and input by input (`InputMajor`).
      quantised: whether it is a part of a `QuantWeight`.
    """

    def __init__(self, name: str, weight: Weight):
        super().__init__(weight.shape, weight.dtype)
        self.name, self.dimensions, kind = name, weight.dimensions, weight.kind
        self.input_major, self.quantised = kind == "input_major", kind == "quantised"

    @property
    def of_slots(self) -> bool:
        """Returns whether every slot of experts has an entry of the array."""
        return self.dimensions[:1] == ("expert_slots",)


class Template:
    """A module without arrays: its structure, and a description of every leaf.

    Programs rebuild the module from flat leaves, the loader makes the leaves, and workers pass
    them to programs, all in the same order.

    Attributes:
      build: makes the module with its arrays.
      leaves: shape, dtype and dimensions of every leaf.
      names: paths of the leaves.
      entries: by the name of a first axis, the entry of the checkpoint's array that each entry of
        the leaf holds at first; negative: none.
      parts: by the path of a matrix, the entries that the checkpoint's array does not have.
    """

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        entries: Mapping[str, tuple[int, ...]] | None = None,
        parts: Mapping[str, AppendedPart] | None = None,
    ):
        self.build = build
        self.entries, self.parts = entries or {}, parts or {}
        # Tracing the initialisation says the same, and takes twenty times as long.
        self._structure, state = nnx.split(build(nnx.Rngs()))
        self._tree = jax.tree.structure(state)
        self.leaves = tuple(
            TemplateLeaf(".".join(map(str, path)), weight)
            for path, weight in nnx.to_flat_state(state)
        )
        self.names = tuple(leaf.name for leaf in self.leaves)

    def merge(self, leaves: Sequence[Array | InputMajor | StackEntry]) -> Any:
        """Rebuilds the module with these leaves, global arrays or one device's slices."""
        if len(leaves) != len(self.leaves):
            raise ValueError(f"{len(leaves)} leaves for a module of {len(self.leaves)}")
        return nnx.merge(self._structure, jax.tree.unflatten(self._tree, leaves))

    def specs(self, rules: Rules) -> tuple[PartitionSpec, ...]:
        """Returns the partition spec of every leaf."""
        return tuple(partition_spec(leaf.dimensions, rules) for leaf in self.leaves)

    def arrays(
        self, mesh: AnyMesh, rules: Rules, layers: int | None = None
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape, dtype and sharding of every leaf on a mesh.

        Args:
          layers: leaves of this many layers, stacked along a new first axis; None: of one.
        """
        if layers is None:
            return placed(mesh, self.leaves, self.specs(rules))
        stacked = [jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        return placed(mesh, stacked, [PartitionSpec(None, *spec) for spec in self.specs(rules)])

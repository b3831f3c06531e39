"""One attention layer of a tiny model on simulated devices, fed ragged steps by hand.

For the tests of the attention families: they compare it with `tests/reference/decoder_numpy.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.source import Source
from jaxserve.config.load import load_deployment
from jaxserve.mesh import ATTENTION_RULES, Submeshes, shards
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.family import attention_module
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_arrays
from jaxserve.model.module import Formats, Template
from pallas_kernels.quantize import dequantize_weight, quantize_weight
from tests.reference.decoder_numpy import DecoderNumpy, DeepseekNumpy, Qwen3Numpy
from tests.reference.tiny_models import TinyModel

PAGE_TABLE = [[3, 7, 1], [9, 0, 5], [2, 11, 4]]
"""Three sequences on pages that do not lie in order."""

PAGE_SIZE, PAGES = 4, 12
LENGTHS = (9, 1, 12)

Row = tuple[int, int, np.ndarray]
"""Sequence, position of the first token, and the tokens' normed activations."""


def inputs(d_model: int) -> list[np.ndarray]:
    """The three sequences' activations."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, d_model)).astype(np.float32) for length in LENGTHS]


def numpy_attention(model: TinyModel, layer: int = 0) -> list[np.ndarray]:
    """What the layer gives for the inputs, float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in model.tensors().items()}
    tree = model.config()
    deepseek = tree["model_type"] in ("deepseek_v3", "kimi_k2")
    reference: DecoderNumpy = (DeepseekNumpy if deepseek else Qwen3Numpy)(tree, tensors)
    return [reference.attention(layer, x.astype(np.float64)) for x in inputs(tree["hidden_size"])]


class Options(NamedTuple):
    """How the layer is run."""

    tp: int = 1
    dtype: str = "float32"
    cache: str = "auto"
    rope: str = "auto"
    weights: str = "plain"
    """Or fp8, int8; "fp8 multiplied out" are the same values in `dtype`."""
    int8_products: bool = False


class Layer:
    """A layer with its cache, which `step` fills.

    Attributes:
      module: of one device, to be looked at.
      pages: the cache's arrays, global.
    """

    def __init__(self, model: TinyModel, options: Options = Options(), layer: int = 0):  # noqa: B008
        tree = model.config()
        family = FAMILIES[tree["model_type"]]
        config = family.config(tree, ())
        deployment = load_deployment(
            Path(__file__).parent,
            {
                "mode": "colocated",
                "attention.tp": options.tp,
                "cache.pages": PAGES,
                "cache.page_size": PAGE_SIZE,
                "cache.format": options.cache,
                "cache.rope": options.rope,
                "dtype": options.dtype,
                "scheduler.max_length": 12,
            },
        )
        self.mesh = Submeshes(deployment).attention
        self.dtype = jnp.dtype(options.dtype)
        weights: Any = "plain" if " " in options.weights else options.weights
        formats = Formats(self.dtype, weights, shards(self.mesh, ATTENTION_RULES))
        kind = config.kind(layer)._replace(int8_products=options.int8_products)
        self.template = Template(lambda rngs: attention_module(config, kind, formats, rngs))
        self.specs = self.template.specs(ATTENTION_RULES)
        tensors, sources = model.tensors(), family.names(config).attention[layer]
        self.leaves = [
            self._put(_leaf(leaf.name, sources, tensors, options.weights), leaf.dtype, spec)
            for leaf, spec in zip(self.template.leaves, self.specs, strict=True)
        ]
        for leaf, shape in zip(self.leaves, self.template.leaves, strict=True):
            assert leaf.shape == shape.shape
        self._page_arrays = page_arrays(config, deployment)
        self._program = self._compiled()
        self.forget()

    @property
    def module(self) -> Any:
        return self.template.merge(self.leaves)

    def forget(self) -> None:
        """Empties the cache."""
        self.pages = tuple(
            self._put(_poison(array), array.dtype, PAGES_SPEC) for array in self._page_arrays
        )

    def step(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """What comes of `rows`, the sum of all devices' shares; padding tokens fill a bucket."""
        lengths = [len(x) for _, _, x in rows]
        padding = (3 if sum(lengths) <= 3 else 24) - sum(lengths)
        d_model = rows[0][2].shape[1]
        x = np.concatenate([x for _, _, x in rows] + [np.full((padding, d_model), 7.0)])
        sequence = np.repeat([s for s, _, _ in rows] + [2], [*lengths, padding])
        position = [start + np.arange(len(x)) for _, start, x in rows]
        start = np.repeat([start for _, start, _ in rows] + [0], [*lengths, padding])
        batch = RaggedBatch(
            jnp.asarray(sequence, jnp.int32),
            jnp.asarray(np.concatenate([*position, np.full(padding, -1)]), jnp.int32),
            jnp.asarray(PAGE_TABLE, jnp.int32),
            jnp.asarray(start, jnp.int32),
        )
        out, self.pages = self._program(self.leaves, jnp.asarray(x, self.dtype), self.pages, batch)
        ends = np.cumsum(lengths)
        return np.split(np.asarray(out[: ends[-1]], np.float32), ends[:-1])

    def _compiled(self) -> Callable[..., Any]:
        def program(leaves: Any, x: Any, pages: Any, batch: Any) -> Any:
            share, pages = self.template.merge(leaves)(x, pages, batch)
            return jax.lax.psum(share.astype(jnp.float32), "tp"), pages

        everywhere = PartitionSpec()
        return jax.jit(
            jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(list(self.specs), everywhere, PAGES_SPEC, everywhere),
                out_specs=(everywhere, PAGES_SPEC),
                check_vma=False,
            )
        )

    def _put(self, value: np.ndarray, dtype: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(jnp.asarray(value, dtype), NamedSharding(self.mesh, spec))


def _leaf(
    name: str, sources: dict[str, Source], tensors: dict[str, np.ndarray], weights: str
) -> np.ndarray:
    """A leaf of the module from the tensors of the checkpoint."""
    base = name.removesuffix(".values").removesuffix(".scales")
    leaf = _plain_leaf(sources[f"attention.{base}"], tensors)
    format: Any = weights.split()[0]
    # Vectors, and the matrices that MLA absorbs, are never quantised.
    if format == "plain" or leaf.ndim != 2:
        return leaf
    quantised = quantize_weight(jnp.asarray(leaf, jnp.float32), format, (1, 0))
    if name == base:
        return np.asarray(dequantize_weight(quantised, jnp.float32))
    return np.asarray(quantised.values if name.endswith(".values") else quantised.scales)


def _plain_leaf(source: Source, tensors: dict[str, np.ndarray]) -> np.ndarray:
    parts = []
    for name in source.names:
        part = tensors[name]
        if source.view is not None:
            shape, axis, start, stop = source.view
            part = np.take(part.reshape(shape), range(start, stop), axis=axis)
        parts.append(part)
    return np.concatenate(parts, axis=max(parts[0].ndim - 2, 0))


def _poison(array: jax.ShapeDtypeStruct) -> np.ndarray:
    """NaN, also as the bits of float8_e4m3fn; INT8 has none, but its scales have."""
    return np.full(array.shape, 0x7F if array.dtype.kind in "iu" else np.nan)


MIXED_STEPS = (
    ((0, 0, 5),),
    ((2, 0, 3), (0, 5, 6)),  # a chunk beside a decode token
    ((0, 6, 7), (1, 0, 1), (2, 3, 11)),
    ((0, 7, 8), (2, 11, 12)),  # decode tokens alone
    ((0, 8, 9),),
)
"""(sequence, first position, one past the last) of every row."""


def whole(layer: Layer, x: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All three sequences in one step."""
    layer.forget()
    return layer.step([(sequence, 0, rows) for sequence, rows in enumerate(x)])


def in_pieces(
    layer: Layer, x: Sequence[np.ndarray], steps: Sequence[Sequence[tuple[int, int, int]]]
) -> list[np.ndarray]:
    """The same in several steps."""
    parts: list[list[np.ndarray]] = [[] for _ in x]
    layer.forget()
    for rows in steps:
        outputs = layer.step([(s, start, x[s][start:stop]) for s, start, stop in rows])
        for (sequence, _, _), output in zip(rows, outputs, strict=True):
            parts[sequence].append(output)
    return [np.concatenate(part) for part in parts]


def token_by_token(layer: Layer, x: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same, each step a token of every sequence that has one."""
    steps = [
        [(s, n, n + 1) for s, rows in enumerate(x) if n < len(rows)]
        for n in range(max(map(len, x)))
    ]
    return in_pieces(layer, x, steps)


def check(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> None:
    """Compares, within `tolerance` of the largest value."""
    largest = max(np.abs(rows).max() for rows in expected)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * largest)

"""One attention layer of a tiny model on simulated devices, fed ragged steps by hand.

For the tests of the attention families: they compare it with the NumPy models of
`tests/reference`, and inherit what every family does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.checkpoint.families import architecture, family_of
from jaxserve.checkpoint.source import Source
from jaxserve.config.load import load_deployment
from jaxserve.config.model import Platform
from jaxserve.mesh import ATTENTION_RULES, Submeshes, shards
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.family import attention_module
from jaxserve.model.attention.kv_cache import PAGES_SPEC, layer_entries, page_arrays
from jaxserve.model.module import Formats, Template, TemplateLeaf
from pallas_kernels.input_major import in_tiles
from pallas_kernels.quantize import dequantize_weight, quantize_weight
from tests.jaxserve.checkpoint.opened import leaf_of
from tests.reference.decoder_numpy import DeepseekNumpy, Glm4Numpy, MinimaxNumpy, Qwen3Numpy
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_step3 import TinyStep3

Model = TinyModel | TinyStep3

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


def numpy_attention(model: Model) -> list[np.ndarray]:
    """Output of layer 0 for the inputs, float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in model.tensors().items()}
    tree = model.config()
    rows = [x.astype(np.float64) for x in inputs(tree["hidden_size"])]
    references = {"step3_text": Step3Numpy, "deepseek_v3": DeepseekNumpy, "qwen3": Qwen3Numpy}
    references |= {"glm4_moe": Glm4Numpy, "minimax_m2": MinimaxNumpy}
    reference = references[tree["model_type"]](tree, tensors)
    return [reference.attention(0, x) for x in rows]


class Options(NamedTuple):
    """How the layer is run."""

    tp: int = 1
    dtype: str = "float32"
    cache: str = "auto"
    rope: str = "auto"
    weights: str = "plain"
    """Or fp8, int8; "fp8 multiplied out" are the same values in `dtype`."""
    int8_products: bool = False
    platform: Platform = "tpu"


class Layer:
    """A layer with its cache, which `step` fills.

    Attributes:
      pages: the cache's arrays, global.
    """

    def __init__(self, model: Model, options: Options = Options()):  # noqa: B008
        tree = model.config()
        family = family_of(tree["model_type"])
        config = msgspec.structs.replace(architecture(tree), platform=options.platform)
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
        kind = config.layer(0)._replace(int8_products=options.int8_products)
        self.template = Template(lambda rngs: attention_module(config, kind, formats, rngs))
        self.specs = self.template.specs(ATTENTION_RULES)
        tensors, sources = model.tensors(), family.names(config).attention[0]
        self.leaves = [
            self._put(_leaf(leaf, sources, tensors, options.weights), leaf.dtype, spec)
            for leaf, spec in zip(self.template.leaves, self.specs, strict=True)
        ]
        self._page_arrays = page_arrays(
            deployment, layer_entries(config, kind.attention, deployment)
        )
        self._program = self._compiled()
        self.forget()

    def forget(self) -> None:
        """Empties the cache."""
        self.pages = tuple(
            self._put(_poison(array), array.dtype, PAGES_SPEC) for array in self._page_arrays
        )

    def step(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Returns the layer's results for `rows`, the sum of all devices' shares; padding tokens
        fill a bucket."""
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
            share, pages, *_ = self.template.merge(leaves)(x, pages, batch)
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
    known: TemplateLeaf, sources: dict[str, Source], tensors: dict[str, np.ndarray], weights: str
) -> np.ndarray:
    """A leaf of the module from the tensors of the checkpoint."""
    base = known.name.removesuffix(".values").removesuffix(".scales")
    leaf = leaf_of(sources[f"attention.{base}"], tensors)
    format: Any = weights.split()[0]
    # Vectors, and the matrices that MLA absorbs, are never quantised.
    if format == "plain" or leaf.ndim != 2:
        return np.asarray(in_tiles(leaf, known.shape[-1])) if known.input_major else leaf
    quantised = quantize_weight(jnp.asarray(leaf, jnp.float32), format, (1, 0))
    if known.name == base:
        return np.asarray(dequantize_weight(quantised, jnp.float32))
    return np.asarray(quantised.values if known.name.endswith(".values") else quantised.scales)


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


EXACT = 2e-5
"""FP32 against float64: this part of the largest value."""


class FamilySuite:
    """Tests of ragged sequences that the attention of every family must pass.

    Attributes:
      variants: Models by name; "plain" is one of them.
      cut: Names of the models that are also fed in pieces.
      in_bfloat16: What BF16 may miss of the largest value.
    """

    variants: ClassVar[dict[str, Model]]
    cut: ClassVar[tuple[str, ...]] = ("plain",)
    in_bfloat16: ClassVar[float] = 0.03
    platform: ClassVar[Platform] = "tpu"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for argument, names in (("variant", self.variants), ("cut_variant", self.cut)):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, names)

    def layer(self, name: str = "plain", **options: Any) -> Layer:
        return Layer(self.variants[name], Options(**options, platform=self.platform))

    @property
    def x(self) -> list[np.ndarray]:
        return inputs(self.variants["plain"].config()["hidden_size"])

    def expected(self, name: str = "plain") -> list[np.ndarray]:
        return numpy_attention(self.variants[name])

    def test_three_sequences_at_once(self, variant: str) -> None:
        check(whole(self.layer(variant), self.x), self.expected(variant), EXACT)

    def test_in_chunks_and_token_by_token(self, cut_variant: str) -> None:
        layer = self.layer(cut_variant)
        for got in (in_pieces(layer, self.x, MIXED_STEPS), token_by_token(layer, self.x)):
            check(got, self.expected(cut_variant), EXACT)

    def test_padding_writes_no_page(self) -> None:
        """A step with one token, and two tokens of padding."""
        layer = self.layer()
        check(layer.step([(1, 0, self.x[1])]), self.expected()[1:2], EXACT)
        for pages in layer.pages:
            assert np.argwhere(~np.isnan(np.asarray(pages)[:, 0, :, 0])).tolist() == [[9, 0]]

    def test_bfloat16(self) -> None:
        layer = self.layer(dtype="bfloat16")
        for got in (whole(layer, self.x), token_by_token(layer, self.x)):
            check(got, self.expected(), self.in_bfloat16)
        assert {array.dtype.name for array in layer.pages} == {"bfloat16"}


class BiasesSuite(FamilySuite):
    """Families with a variant "biases", whose matrices may be quantised."""

    @pytest.mark.parametrize("tp", [1, 2])
    def test_fp8_weights_are_the_values_that_they_stand_for(self, tp: int) -> None:
        """Whatever the devices: a scale an output channel is not cut."""
        quantised = whole(self.layer("biases", tp=tp, weights="fp8"), self.x)
        plain = whole(self.layer("biases", weights="fp8 multiplied out"), self.x)
        check(quantised, plain, EXACT)

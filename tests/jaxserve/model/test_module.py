import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.checkpoint.random_leaves import random_leaves
from jaxserve.model.module import (
    Formats,
    Template,
    Weight,
    linear,
    matrix,
    scale,
    side_by_side,
    weight,
    zeros,
)
from pallas_kernels import input_major
from tests import golden


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = scale(rngs, jnp.dtype(jnp.float32), d_model=4)
        self.square = weight(rngs, jnp.dtype(jnp.bfloat16), d_model=4, d_model_=4)
        self.experts = weight(rngs, jnp.dtype(jnp.float32), experts=6, d_model=4, d_ff=8)


RULES = {"experts": "ep", "d_ff": "tp"}


@pytest.mark.parametrize(("shards", "width"), [({}, 16), ({"d_ff": 4}, 12), ({"other": 4}, 16)])
def test_no_tile_spans_two_devices(shards, width, monkeypatch):
    monkeypatch.setattr(input_major, "TILE", 16)
    tiled = Weight(jnp.zeros((48, 8)), ("d_ff", "d_model")).by_inputs(shards)
    assert tiled.shape == (48 // width, 8, width)


class TestTemplate:
    def test_names_shapes_and_dimensions(self):
        template = Template(Block)
        found = {leaf.name: (leaf.shape, leaf.dtype, leaf.dimensions) for leaf in template.leaves}
        assert found == {
            "norm": ((4,), jnp.float32, ("d_model",)),
            "square": ((4, 4), jnp.bfloat16, ("d_model", "d_model")),
            "experts": ((6, 4, 8), jnp.float32, ("experts", "d_model", "d_ff")),
        }

    def test_specs(self):
        template = Template(Block)
        assert dict(zip(template.names, template.specs(RULES), strict=True)) == {
            "norm": PartitionSpec(None),
            "square": PartitionSpec(None, None),
            "experts": PartitionSpec("ep", None, "tp"),
        }

    def test_merge_puts_leaves_where_they_belong(self):
        template = Template(Block)
        leaves = [jnp.full(leaf.shape, n, leaf.dtype) for n, leaf in enumerate(template.leaves)]
        block = template.merge(leaves)
        for n, name in enumerate(template.names):
            np.testing.assert_array_equal(np.asarray(getattr(block, name)[...], np.float32), n)

    def test_random_leaves(self):
        template = Template(Block)
        leaves = random_leaves(template, 0)
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
            (leaf.shape, leaf.dtype) for leaf in template.leaves
        ]
        experts = leaves[template.names.index("experts")]
        assert np.std(np.asarray(experts)) == pytest.approx(8**-0.5, rel=0.2)


FLOAT32 = jnp.dtype(jnp.float32)


def made(weights, parts=(), shards=None, dtype=jnp.float32, **dimensions):
    """Result of `matrix` in a format, or of `side_by_side` for several parts."""
    formats = Formats(jnp.dtype(dtype), weights, shards or {})
    if parts:
        return side_by_side(nnx.Rngs(0), formats, parts, **dimensions)
    return matrix(nnx.Rngs(0), formats, **dimensions)


class TestMatrix:
    def test_plain(self):
        made_plain = made("plain", dtype=jnp.bfloat16, d_ff=4, d_model=6)
        assert isinstance(made_plain, Weight)
        assert (made_plain[...].shape, made_plain[...].dtype) == ((4, 6), jnp.bfloat16)

    @pytest.mark.parametrize(("weights", "dtype"), [("fp8", jnp.float8_e4m3fn), ("int8", jnp.int8)])
    def test_a_scale_an_output_channel(self, weights, dtype):
        quantised = made(weights, d_ff=4, d_model=300)[...]
        assert (quantised.values.shape, quantised.values.dtype) == ((4, 300), dtype)
        assert (quantised.scales.shape, quantised.scales.dtype) == ((4, 1), jnp.float32)
        assert quantised.block == (1, 0)

    def test_of_every_expert(self):
        quantised = made("int8", experts=3, expert_d_ff=4, d_model=6)[...]
        assert (quantised.values.shape, quantised.scales.shape) == ((3, 4, 6), (3, 4, 1))

    @golden.table("model/blocks_of_shards.yaml")
    def test_no_block_lies_on_two_devices(self, shards, block, scales):
        quantised = made("fp8_block", shards=shards, d_model=300, d_ff=192)[...]
        assert [[*quantised.block], [*quantised.scales.shape]] == [block, scales]
        for size, part, axis in zip(block, ("d_model", "d_ff"), (300, 192), strict=True):
            assert 128 % size == 0
            assert shards.get(part, 1) == 1 or axis // shards[part] % size == 0

    @golden.table("model/blocks_of_parts.yaml")
    def test_no_block_has_rows_of_two_maps(self, parts, block):
        quantised = made("fp8_block", parts, rows=sum(parts), d_model=128)[...]
        assert quantised.block == (block, 128)
        starts = np.cumsum(parts)[:-1]
        assert np.all(starts % block == 0)

    def test_a_stack_counts_from_its_last_two_dimensions(self):
        shards = {"experts": 2, "expert_d_ff": 4}
        quantised = made("fp8_block", shards=shards, experts=2, expert_d_ff=256, d_model=128)[...]
        assert (quantised.block, quantised.scales.shape) == ((64, 128), (2, 4, 1))

    def test_the_values_are_those_of_the_plain_matrix(self):
        plain = np.asarray(made("plain", d_ff=130, d_model=200)[...])
        for weights, error in (("fp8", 2**-4), ("fp8_block", 2**-4), ("int8", 0.01)):
            quantised = made(weights, d_ff=130, d_model=200)
            x = jnp.eye(200, dtype=jnp.float32)
            product = np.asarray(linear(x, quantised))
            assert np.abs(product - plain.T).max() <= error * np.abs(plain).max()


class Quantised(nnx.Module):
    def __init__(self, weights: str, rngs: nnx.Rngs):
        formats = Formats(FLOAT32, weights, {"q_heads": 2})
        self.up = matrix(rngs, formats, q_heads=64, d_model=128)
        self.down = matrix(rngs, formats, d_model=128, q_heads=64)
        self.bias = zeros(rngs, FLOAT32, q_heads=64)


class TestQuantisedTemplate:
    """Values and scales are leaves of their own, cut by the same rules."""

    @pytest.mark.parametrize(
        ("weights", "down", "up"),
        [
            ("int8", ((128, 1), (None, None)), ((64, 1), ("tp", None))),
            ("fp8_block", ((1, 2), (None, "tp")), ((2, 1), ("tp", None))),
        ],
    )
    def test_leaves(self, weights, down, up):
        template = Template(lambda rngs: Quantised(weights, rngs))
        rules = {"q_heads": "tp"}
        found = {
            leaf.name: (leaf.shape, tuple(spec))
            for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        }
        assert found == {
            "bias": ((64,), ("tp",)),
            "down.values": ((128, 64), (None, "tp")),
            "down.scales": down,
            "up.values": ((64, 128), ("tp", None)),
            "up.scales": up,
        }

    def test_a_devices_slices(self):
        """The block is the same on every device."""
        template = Template(lambda rngs: Quantised("fp8_block", rngs))
        specs = template.specs({"q_heads": "tp"})
        halves = []
        for leaf, spec in zip(random_leaves(template, 0), specs, strict=True):
            sizes = zip(leaf.shape, spec, strict=True)
            halves.append(leaf[tuple(slice(n // 2 if axis else n) for n, axis in sizes)])
        module = template.merge(halves)
        assert module.up[...].shape == (32, 128)
        assert linear(jnp.ones((3, 128)), module.up).shape == (3, 32)
        assert linear(jnp.ones((3, 32)), module.down).shape == (3, 128)


class TestLinear:
    def test_bias_is_added_in_fp32(self):
        """256 + 1 is 256 in BF16, so that 257 + 1 would be, too."""
        x = jnp.asarray([[256.0, 1.0]], jnp.bfloat16)
        bias = Weight(jnp.ones(1, jnp.bfloat16))
        out = linear(x, Weight(jnp.ones((1, 2), jnp.bfloat16)), bias)
        assert (float(out[0, 0]), out.dtype) == (258.0, jnp.bfloat16)

    def test_accumulates_in_fp32(self):
        """256 + 1 is 256 in BF16, whose sum of 256 and 512 ones would stay at 256."""
        x = jnp.concatenate([jnp.full((1, 1), 256.0), jnp.ones((1, 512))], axis=1)
        x = x.astype(jnp.bfloat16)
        out = linear(x, Weight(jnp.ones((1, 513), jnp.bfloat16)))
        assert out.dtype == jnp.bfloat16
        assert float(out[0, 0]) == 768.0

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.module import Template, Weight, linear, rms_norm, scale, weight
from tests.reference import step3_numpy


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = scale(jnp.dtype(jnp.float32), d_model=4)
        self.square = weight(rngs, jnp.dtype(jnp.bfloat16), d_model=4, d_model_=4)
        self.experts = weight(rngs, jnp.dtype(jnp.float32), experts=6, d_model=4, d_ff=8)


RULES = {"experts": "ep", "d_ff": "tp"}


class TestTemplate:
    def test_names_shapes_and_dimensions(self):
        template = Template(Block)
        found = {
            name: (leaf.shape, leaf.dtype, dimensions)
            for name, leaf, dimensions in zip(
                template.names, template.leaves, template.dimensions, strict=True
            )
        }
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

    def test_merge_takes_a_devices_slices(self):
        """Inside `shard_map` every leaf is smaller than the template says."""
        template = Template(Block)
        leaves = [jnp.zeros((2,) * len(leaf.shape), leaf.dtype) for leaf in template.leaves]
        assert template.merge(leaves).experts[...].shape == (2, 2, 2)

    def test_random_leaves(self):
        template = Template(Block)
        leaves = template.random(0)
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
            (leaf.shape, leaf.dtype) for leaf in template.leaves
        ]
        experts = leaves[template.names.index("experts")]
        assert np.std(np.asarray(experts)) == pytest.approx(4**-0.5, rel=0.2)


class TestLinear:
    def test_accumulates_in_fp32(self):
        """256 + 1 is 256 in BF16, whose sum of 256 and 512 ones would stay at 256."""
        x = jnp.concatenate([jnp.full((1, 1), 256.0), jnp.ones((1, 512))], axis=1)
        x = x.astype(jnp.bfloat16)
        out = linear(x, Weight(jnp.ones((513, 1), jnp.bfloat16)))
        assert out.dtype == jnp.bfloat16
        assert float(out[0, 0]) == 768.0

    def test_fp32(self):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(3, 64)), rng.normal(size=(64, 5))
        out = linear(jnp.asarray(x, jnp.float32), Weight(jnp.asarray(w, jnp.float32)))
        np.testing.assert_allclose(np.asarray(out), x @ w, atol=1e-5)


class TestRMSNorm:
    def test_literal(self):
        out = rms_norm(jnp.asarray([[3.0, 4.0]]), jnp.asarray([1.0, 2.0]), 0.0)
        np.testing.assert_allclose(np.asarray(out), [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6)

    def test_against_numpy(self):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(5, 64)), rng.uniform(0.8, 1.2, 64)
        out = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), 1e-5)
        np.testing.assert_allclose(np.asarray(out), step3_numpy.rms_norm(x, w, 1e-5), atol=1e-5)

    def test_bfloat16_is_normed_in_fp32_and_rounded_before_the_weight(self):
        x = jax.random.normal(jax.random.key(0), (2, 64), jnp.bfloat16) * 100
        w = jnp.full(64, 1.5, jnp.bfloat16)
        x32 = np.asarray(x, np.float32)
        normed = x32 / np.sqrt(np.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
        expected = normed.astype(jnp.bfloat16) * np.asarray(w)
        out = rms_norm(x, w, 1e-5)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(out, np.float32), expected.astype(np.float32), rtol=2**-7
        )

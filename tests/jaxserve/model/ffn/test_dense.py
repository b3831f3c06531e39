import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.model.ffn.dense import DenseFFN
from jaxserve.model.module import Formats


def dense(gate, up, down, dtype=jnp.float32):
    module = DenseFFN(gate.shape[1], gate.shape[0], Formats(jnp.dtype(dtype)), nnx.Rngs(0))
    for parameter, value in ((module.gate, gate), (module.up, up), (module.down, down)):
        assert parameter[...].shape == value.shape
        parameter.set_value(jnp.asarray(value, dtype))
    return module


def drawn(seed, d_ff, d_model, scale=1.0):
    """Random gate, up and down, and the generator for rows."""
    rng = np.random.default_rng(seed)
    shapes = ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff))
    return rng, *(rng.normal(scale=scale, size=shape).astype(np.float32) for shape in shapes)


def test_literal():
    """silu(1) = 0.731059, times 2, times 3."""
    one, two, three = (np.full((1, 1), value, np.float32) for value in (1, 2, 3))
    out = dense(one, two, three)(jnp.ones((1, 1)))
    np.testing.assert_allclose(np.asarray(out), [[0.7310586 * 2 * 3]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shares_of_d_ff_add_up(dtype):
    rng, gate, up, down = drawn(0, 12, 16, 0.2)
    x = rng.normal(size=(5, 16)).astype(np.float32)
    a = x @ gate.T
    expected = (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T
    parts = [
        dense(gate[s], up[s], down[:, s], dtype)(jnp.asarray(x, dtype))
        for s in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]
    assert all(part.dtype == dtype for part in parts)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    total = np.sum([np.asarray(part, np.float32) for part in parts], axis=0)
    np.testing.assert_allclose(total, expected, atol=tolerance)


def test_steps():
    """A product at a time gives the same."""
    rng, gate, up, down = drawn(2, 6, 8)
    module, x = dense(gate, up, down), jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    steps, value = module.steps(x), (x, None, None)
    assert len(steps) == 3
    for step in steps:
        value = step(value)
    np.testing.assert_array_equal(np.asarray(value), np.asarray(module(x)))

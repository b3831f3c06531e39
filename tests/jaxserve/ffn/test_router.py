import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config.model import Router as Rule
from jaxserve.ffn.router import Router
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3


def router(weights: np.ndarray, top_k: int, *, renormalise: bool = False, dtype=jnp.float32):
    """Of `weights` [experts, d_model], as a checkpoint has them."""
    experts, d_model = weights.shape
    rule = Rule(experts=experts, top_k=top_k, renormalise=renormalise)
    module = Router(d_model, rule, jnp.dtype(dtype), nnx.Rngs(0))
    assert module.gate[...].shape == (d_model, experts)
    module.gate.set_value(jnp.asarray(weights.T, dtype))
    return module


# Probabilities 0.1, 0.2, 0.4, 0.1, 0.2 of x = 1.
WEIGHTS = np.log([[1.0], [2.0], [4.0], [1.0], [2.0]])


def test_weights_are_raw_probabilities_the_best_first():
    experts, gates = router(WEIGHTS, 3)(jnp.ones((1, 1)), jnp.asarray([True]), 5)
    assert gates.dtype == jnp.float32
    assert np.asarray(experts).tolist() == [[2, 1, 4]]
    np.testing.assert_allclose(np.asarray(gates), [[0.4, 0.2, 0.2]], rtol=1e-6)


def test_renormalised_where_the_model_says_so():
    _, gates = router(WEIGHTS, 3, renormalise=True)(jnp.ones((1, 1)), jnp.asarray([True]), 5)
    np.testing.assert_allclose(np.asarray(gates), [[0.5, 0.25, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("sentinel", [5, 6, 1000])
def test_padding_gets_the_sentinel_and_no_weight(sentinel):
    x = jnp.asarray([[1.0], [jnp.nan], [1.0]])
    experts, gates = router(WEIGHTS, 2)(x, jnp.asarray([True, False, False]), sentinel)
    assert np.asarray(experts).tolist() == [[2, 1], [sentinel] * 2, [sentinel] * 2]
    np.testing.assert_allclose(np.asarray(gates), [[0.4, 0.2], [0, 0], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("renormalise", [False, True])
def test_against_numpy(renormalise):
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.3, size=(48, 64)).astype(np.float32)
    x = rng.normal(size=(33, 64)).astype(np.float32)
    config = TinyStep3(norm_expert_weight=renormalise).config()
    chosen, expected = Step3Numpy(config, {"r.gate.weight": weights}).route("r", x)
    module = router(weights, 3, renormalise=renormalise)
    experts, gates = module(jnp.asarray(x), jnp.ones(33, bool), 48)
    np.testing.assert_array_equal(np.asarray(experts), chosen)
    np.testing.assert_allclose(np.asarray(gates), expected, rtol=2e-5)


def test_softmax_is_fp32_in_bfloat16_models():
    module = router(WEIGHTS, 3, dtype=jnp.bfloat16)
    _, gates = module(jnp.ones((1, 1), jnp.bfloat16), jnp.asarray([True]), 5)
    assert gates.dtype == jnp.float32
    logits = np.asarray(WEIGHTS, jnp.bfloat16).astype(np.float32)[:, 0]
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(np.asarray(gates)[0], np.sort(expected)[:1:-1], rtol=1e-5)

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config.model import RouterSpec as Rule
from jaxserve.model.ffn.router import ExpertRouter
from tests import golden
from tests.reference.decoder_numpy import DeepseekNumpy
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3


def router(weights: np.ndarray, top_k: int, *, bias=None, dtype=jnp.float32, **rule):
    """A router with `weights` [experts, d_model], as a checkpoint has them."""
    experts, d_model = weights.shape
    asked = Rule(experts=experts, top_k=top_k, bias=bias is not None, **rule)
    module = ExpertRouter(d_model, asked, jnp.dtype(dtype), nnx.Rngs(0))
    assert module.gate[...].shape == (experts, d_model)
    module.gate.set_value(jnp.asarray(weights, dtype))
    if bias is not None:
        assert (module.bias[...].shape, module.bias[...].dtype) == ((experts,), jnp.float32)
        module.bias.set_value(jnp.asarray(bias, jnp.float32))
    return module


def route(module: ExpertRouter, x, dtype=jnp.float32) -> tuple[list[list[int]], np.ndarray]:
    """Experts and gate weights of valid tokens."""
    x = jnp.asarray(x, dtype)
    experts, gates = module(x, jnp.ones(len(x), bool), 10_000)
    return np.asarray(experts).tolist(), np.asarray(gates)


# Probabilities 0.1, 0.2, 0.4, 0.1, 0.2 of x = 1.
WEIGHTS = np.log([[1.0], [2.0], [4.0], [1.0], [2.0]])


@pytest.mark.parametrize(
    ("renormalise", "expected"), [(False, [0.4, 0.2, 0.2]), (True, [0.5, 0.25, 0.25])]
)
def test_the_best_come_first_with_raw_or_renormalised_probabilities(renormalise, expected):
    experts, gates = route(router(WEIGHTS, 3, renormalise=renormalise), [[1.0]])
    assert experts == [[2, 1, 4]]
    assert gates.dtype == np.float32
    np.testing.assert_allclose(gates, [expected], rtol=1e-6)


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
    chosen, expected = Step3Numpy(config, {"r.gate.weight": weights}).choose("r", x)
    experts, gates = route(router(weights, 3, renormalise=renormalise), x)
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_allclose(gates, expected, rtol=2e-5)


def test_softmax_is_fp32_in_bfloat16_models():
    _, gates = route(router(WEIGHTS, 3, dtype=jnp.bfloat16), [[1.0]], jnp.bfloat16)
    assert gates.dtype == np.float32
    logits = np.asarray(WEIGHTS, jnp.bfloat16).astype(np.float32)[:, 0]
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(gates[0], np.sort(expected)[:1:-1], rtol=1e-5)


def logit(scores) -> np.ndarray:
    """Weights of a router whose sigmoid scores of x = 1 are these."""
    scores = np.asarray(scores)
    return np.log(scores / (1 - scores))[:, None]


SCORES = (0.5, 0.2, 0.4, 0.1)
GROUPED = (0.85, 0.05, 0.6, 0.5, 0.3, 0.7)
"""In groups of two, the sums are 0.9, 1.1 and 1.0."""
ONE, TWO, ALL = ({"groups": 3, "top_groups": count} for count in (1, 2, 3))


def test_sigmoid():
    def call(scores, count, rule):
        found, gates = route(router(logit(scores), count, score="sigmoid", **rule), [[1.0]])
        return found[0], [round(float(gate), 6) for gate in gates[0]]

    golden.check_values("model/sigmoid_router.txt", call, globals())


def test_scores_of_zero_are_renormalised_without_nan():
    module = router(np.full((3, 1), -200.0), 2, score="sigmoid", renormalise=True)
    assert route(module, [[1.0]])[1].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_deepseek_against_numpy(groups, top_groups, renormalise):
    rng = np.random.default_rng(0)
    weights = rng.normal(scale=0.3, size=(32, 24)).astype(np.float32)
    bias = rng.normal(scale=0.3, size=32).astype(np.float32)
    x = rng.normal(size=(50, 24)).astype(np.float32)
    config = {"n_group": groups, "topk_group": top_groups, "num_experts_per_tok": 6}
    config |= {"norm_topk_prob": renormalise, "routed_scaling_factor": 2.5}
    tensors = {"r.weight": weights, "r.e_score_correction_bias": bias}
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    rule = {"groups": groups, "top_groups": top_groups, "renormalise": renormalise, "bias": bias}
    module = router(weights, 6, score="sigmoid", float32_logits=True, scaling=2.5, **rule)
    expected = DeepseekNumpy(config, tensors).route("r", x.astype(np.float64))
    assert np.all((expected > 0).sum(axis=1) == 6)
    experts, gates = route(module, x)
    got = np.zeros_like(expected)
    np.put_along_axis(got, np.asarray(experts), gates, axis=1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_logits_in_fp32_where_the_model_says_so():
    """1 + 2^-9 and 1 are the same number in BF16, so that only FP32 logits tell them apart."""
    weights = np.asarray([[1.0, 0.0], [1.0, 2.0**-9]])
    x = [[1.0, 1.0]]
    for float32_logits, best in ((False, 0), (True, 1)):
        module = router(
            weights, 1, score="sigmoid", float32_logits=float32_logits, dtype=jnp.bfloat16
        )
        experts, gates = route(module, x, jnp.bfloat16)
        assert experts == [[best]]
        assert gates.dtype == np.float32
    np.testing.assert_allclose(gates, [[1 / (1 + np.exp(-1 - 2.0**-9))]], rtol=1e-6)

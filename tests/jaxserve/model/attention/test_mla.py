"""MLA alone, against NumPy: several ragged sequences at once, whole and in pieces.

A step of three tokens or fewer attends absorbed, a longer one naively inside itself and absorbed to
what came before; NumPy does neither, it makes keys and values of every head for all tokens.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.checkpoint.deepseek import deepseek_config
from jaxserve.config.model import LayerKind
from jaxserve.errors import ConfigError
from jaxserve.model.attention.family import attention_module
from jaxserve.model.module import Formats, Rngs
from tests.jaxserve.model.attention.layers import (
    MIXED_STEPS,
    Layer,
    Options,
    check,
    in_pieces,
    inputs,
    numpy_attention,
    token_by_token,
    whole,
)
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyDeepseek, Yarn

pytestmark = pytest.mark.unoptimised

SIZES = TinyDeepseek(num_hidden_layers=1, first_k_dense_replace=1)
EXACT = 2e-5
"""Of the largest value; FP32 against float64."""

X = inputs(SIZES.hidden_size)

VARIANTS = {
    "plain": SIZES,
    "full query": replace(SIZES, q_lora_rank=None),
    "biases": replace(SIZES, attention_bias=True),
    "full query, biases": replace(SIZES, q_lora_rank=None, attention_bias=True),
    "yarn": replace(SIZES, yarn=Yarn(mscale=1.0, mscale_all_dim=1.0)),
    "yarn, mscales": replace(SIZES, yarn=Yarn(40.0, 4096, mscale=0.7, mscale_all_dim=1.2)),
    "epsilon": replace(SIZES, rms_norm_eps=0.5),  # not of the latents' norms
}


def model(name: str = "plain") -> TinyModel:
    return TinyModel(name, VARIANTS[name], seed=5)


@functools.cache
def expected(name: str = "plain") -> list[np.ndarray]:
    return numpy_attention(model(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_three_sequences_at_once(name: str):
    check(whole(Layer(model(name)), X), expected(name), EXACT)


@pytest.mark.parametrize("name", ["plain", "yarn, mscales"])
def test_in_chunks_and_token_by_token(name: str):
    layer = Layer(model(name))
    check(in_pieces(layer, X, MIXED_STEPS), expected(name), EXACT)
    check(token_by_token(layer, X), expected(name), EXACT)


@pytest.mark.parametrize(("name", "tp"), [("biases", 2), ("full query, biases", 4)])
def test_shares_of_the_devices_add_up(name: str, tp: int):
    layer = Layer(model(name), Options(tp=tp))
    check(in_pieces(layer, X, MIXED_STEPS), expected(name), EXACT)
    # Each device has the latent, which all of its heads read.
    (latent,) = layer.pages
    assert latent.shape == (12, tp, 4, 40)
    for device in range(1, tp):
        np.testing.assert_array_equal(np.asarray(latent)[:, device], np.asarray(latent)[:, 0])


def test_padding_writes_no_page():
    """A step with one token, and two tokens of padding."""
    layer = Layer(model())
    check(layer.step([(1, 0, X[1])]), expected()[1:2], EXACT)
    (latent,) = layer.pages
    assert np.argwhere(~np.isnan(np.asarray(latent)[:, 0, :, 0])).tolist() == [[9, 0]]


@pytest.mark.parametrize(("cache", "tolerance"), [("fp8", 0.08), ("int8", 0.03)])
def test_cache_in_8_bits(cache: str, tolerance: float):
    """A chunk sees its own rows as the cache holds them, so that it does not matter how a prompt
    is cut."""
    layer = Layer(model(), Options(cache=cache))
    at_once = whole(layer, X)
    check(at_once, expected(), tolerance)
    # Where a value lies between two of the format's, another order of sums may take the other one.
    check(in_pieces(layer, X, MIXED_STEPS), at_once, 0.005)
    check(token_by_token(layer, X), at_once, 0.005)
    latent, scales = layer.pages
    assert latent.shape == (12, 1, 4, 40)
    assert latent.dtype == ("uint8" if cache == "fp8" else "int8")
    assert (scales.shape, scales.dtype) == ((12, 1, 4), "float32")


def test_rotated_part_in_bf16_beside_latents_in_int8():
    """A chunk, one token, and what came before see the same rows."""
    layer = Layer(model(), Options(cache="int8", rope="bfloat16"))
    at_once = whole(layer, X)
    check(at_once, expected(), 0.03)
    check(in_pieces(layer, X, MIXED_STEPS), at_once, 0.005)
    kinds = [(array.shape, array.dtype.name) for array in layer.pages]
    shapes = [((12, 1, 4, 32), "int8"), ((12, 1, 4, 8), "bfloat16"), ((12, 1, 4), "float32")]
    assert kinds == shapes


def test_products_in_int8():
    """Of tokens that attend to latents as they are, and beside a chunk, whose own are in floats."""
    layer = Layer(model(), Options(cache="int8", rope="bfloat16", int8_products=True))
    check(in_pieces(layer, X, MIXED_STEPS), expected(), 0.05)


@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_weights_are_the_values_that_they_stand_for(tp: int):
    quantised = whole(Layer(model("biases"), Options(tp=tp, weights="fp8")), X)
    plain = whole(Layer(model("biases"), Options(weights="fp8 multiplied out")), X)
    check(quantised, plain, EXACT)


def test_bfloat16():
    layer = Layer(model(), Options(dtype="bfloat16"))
    check(whole(layer, X), expected(), 0.05)
    check(token_by_token(layer, X), expected(), 0.05)
    assert layer.pages[0].dtype == "bfloat16"


def test_leaves():
    module = Layer(model("biases")).module
    assert module.down[...].shape == (24 + 32 + 8, 48)
    assert module.query_up[...].shape == (4 * (16 + 8), 24)
    assert module.key_up[...].shape == (4, 16, 32)
    assert module.value_up[...].shape == (4, 12, 32)
    assert module.out[...].shape == (48, 4 * 12)
    assert module.down_bias[...].shape == (64,)
    full = Layer(model("full query")).module
    assert full.down[...].shape == (40, 48)
    assert (full.down_bias, full.query_norm, full.out_bias) == (None, None, None)
    assert full.query_up[...].shape == (96, 48)


def test_a_window_is_refused():
    config = deepseek_config(SIZES.config())
    with pytest.raises(ConfigError, match="latent attention with a sliding window"):
        attention_module(config, LayerKind("dense", 8), Formats(np.dtype("float32")), Rngs(0))

"""GQA alone, against NumPy: several ragged sequences at once, whole and in pieces."""

import functools
from dataclasses import replace

import numpy as np
import pytest

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
from tests.reference.tiny_sizes import TinyQwen3, Yarn

pytestmark = pytest.mark.unoptimised

SIZES = TinyQwen3(num_hidden_layers=1)
EXACT = 2e-5
"""Of the largest value; FP32 against float64."""

X = inputs(SIZES.hidden_size)

VARIANTS = {
    "plain": SIZES,
    "biases": replace(SIZES, attention_bias=True),
    "one key head": replace(SIZES, num_key_value_heads=1),
    "as many key heads": replace(SIZES, num_key_value_heads=4),
    "window": replace(SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "window of one": replace(SIZES, use_sliding_window=True, sliding_window=1, max_window_layers=0),
    "yarn": replace(SIZES, yarn=Yarn()),
}


def model(name: str = "plain") -> TinyModel:
    return TinyModel(name, VARIANTS[name], seed=5)


@functools.cache
def expected(name: str = "plain") -> list[np.ndarray]:
    return numpy_attention(model(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_three_sequences_at_once(name: str):
    check(whole(Layer(model(name)), X), expected(name), EXACT)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_in_chunks_and_token_by_token(name: str):
    layer = Layer(model(name))
    check(in_pieces(layer, X, MIXED_STEPS), expected(name), EXACT)
    check(token_by_token(layer, X), expected(name), EXACT)


def test_products_in_int8():
    layer = Layer(model("window"), Options(cache="int8", int8_products=True))
    check(whole(layer, X), expected("window"), 0.05)


def test_the_window_is_felt():
    """Or the tests above would say nothing of it."""
    plain, windowed = expected("plain"), expected("window")
    np.testing.assert_array_equal(windowed[0][:5], plain[0][:5])
    assert np.abs(windowed[0][5:] - plain[0][5:]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("biases", 2),
        ("biases", 4),  # two K heads on four devices
        ("one key head", 4),
        ("as many key heads", 4),
    ],
)
def test_shares_of_the_devices_add_up(name: str, tp: int):
    layer = Layer(model(name), Options(tp=tp))
    check(in_pieces(layer, X, MIXED_STEPS), expected(name), EXACT)
    heads = max(VARIANTS[name].num_key_value_heads, tp)
    assert [array.shape for array in layer.pages] == [(12, heads, 4, 16)] * 2


def test_devices_that_share_a_head_hold_it_each():
    """tp 4 of two K heads: devices 0 and 1 have the first, 2 and 3 the second."""
    one, four = Layer(model()), Layer(model(), Options(tp=4))
    for layer in (one, four):
        whole(layer, X)
    for mine, theirs in zip(four.pages, one.pages, strict=True):
        np.testing.assert_allclose(
            np.asarray(mine), np.repeat(np.asarray(theirs), 2, axis=1), atol=1e-5
        )


def test_more_devices_than_heads_with_several_queries_each():
    """Eight queries, two K heads, four devices."""
    sizes = replace(SIZES, num_attention_heads=8, attention_bias=True)
    tiny = TinyModel("eight", sizes, seed=1)
    check(whole(Layer(tiny, Options(tp=4)), X), numpy_attention(tiny), EXACT)


def test_padding_writes_no_page():
    layer = Layer(model())
    layer.step([(1, 0, X[1])])
    for pages in layer.pages:
        assert np.argwhere(~np.isnan(np.asarray(pages)[:, 0, :, 0])).tolist() == [[9, 0]]


@pytest.mark.parametrize(("cache", "tolerance"), [("fp8", 0.05), ("int8", 0.02)])
@pytest.mark.parametrize("tp", [1, 4])
def test_cache_in_8_bits(cache: str, tolerance: float, tp: int):
    layer = Layer(model(), Options(tp=tp, cache=cache))
    got = in_pieces(layer, X, MIXED_STEPS)
    check(got, expected(), tolerance)
    with pytest.raises(AssertionError):
        check(got, expected(), 1e-4)
    assert [(array.shape, array.dtype) for array in layer.pages] == [
        ((12, max(2, tp), 4, 16), "uint8" if cache == "fp8" else "int8"),
    ] * 2 + [((12, max(2, tp), 4), "float32")] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_weights_are_the_values_that_they_stand_for(tp: int):
    """Whatever the devices: a scale an output channel is not cut."""
    quantised = whole(Layer(model("biases"), Options(tp=tp, weights="fp8")), X)
    plain = whole(Layer(model("biases"), Options(weights="fp8 multiplied out")), X)
    check(quantised, plain, EXACT)


def test_int8_weights_are_close():
    check(whole(Layer(model(), Options(weights="int8")), X), expected(), 0.05)


def test_bfloat16():
    layer = Layer(model(), Options(dtype="bfloat16"))
    check(whole(layer, X), expected(), 0.03)
    assert {array.dtype.name for array in layer.pages} == {"bfloat16"}


def test_leaves():
    module = Layer(model("biases")).module
    assert module.query[...].shape == (64, 48)
    assert module.key[...].shape == module.value[...].shape == (32, 48)
    assert module.out[...].shape == (48, 64)
    assert module.key_norm[...].shape == (16,)
    assert (module.query_bias[...].shape, module.out_bias[...].shape) == ((64,), (48,))
    assert Layer(model()).module.out_bias is None

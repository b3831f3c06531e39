"""GQA alone, against NumPy: several ragged sequences at once, whole and in pieces."""

from dataclasses import replace

import numpy as np
import pytest

from tests import golden
from tests.jaxserve.model.attention import layers
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyGlm4, TinyMinimax, TinyQwen3, Yarn

pytestmark = pytest.mark.unoptimised

SIZES = TinyQwen3(num_hidden_layers=1)
WINDOW = replace(SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0)
VARIANTS = {
    "plain": SIZES,
    "biases": replace(SIZES, attention_bias=True),
    "one key head": replace(SIZES, num_key_value_heads=1),
    "as many key heads": replace(SIZES, num_key_value_heads=4),
    "eight queries": replace(SIZES, num_attention_heads=8, attention_bias=True),
    "window": WINDOW,
    "window of one": replace(WINDOW, sliding_window=1),
    "yarn": replace(SIZES, yarn=Yarn()),
    "partial": TinyGlm4(num_hidden_layers=1, yarn=Yarn()),
    "columns": TinyMinimax(num_hidden_layers=1, num_attention_heads=8),
}


class TestGQA(layers.BiasesSuite):
    variants = {name: TinyModel(name, sizes, seed=5) for name, sizes in VARIANTS.items()}  # noqa: RUF012
    cut = ("plain", "window")

    def test_products_in_int8(self):
        layer = self.layer("window", cache="int8", int8_products=True)
        layers.check(layers.whole(layer, self.x), self.expected("window"), 0.05)

    def test_the_window_is_felt(self):
        """Or the tests above would say nothing of it."""
        plain, windowed = self.expected("plain"), self.expected("window")
        np.testing.assert_array_equal(windowed[0][:5], plain[0][:5])
        assert np.abs(windowed[0][5:] - plain[0][5:]).max() > 0.1

    @golden.table("model/shares_of_heads.yaml")
    def test_shares_of_the_devices_add_up(self, name, tp):
        layer = self.layer(name, tp=tp)
        layers.check(
            layers.in_pieces(layer, self.x, layers.MIXED_STEPS), self.expected(name), layers.EXACT
        )
        heads = max(VARIANTS[name].num_key_value_heads, tp)
        assert [array.shape for array in layer.pages] == [(12, heads, 4, 16)] * 2

    @pytest.mark.parametrize(("cache", "tolerance"), [("fp8", 0.05), ("int8", 0.02)])
    @pytest.mark.parametrize("tp", [1, 4])
    def test_cache_in_8_bits(self, cache, tolerance, tp):
        layer = self.layer(tp=tp, cache=cache)
        got = layers.in_pieces(layer, self.x, layers.MIXED_STEPS)
        layers.check(got, self.expected(), tolerance)
        with pytest.raises(AssertionError):
            layers.check(got, self.expected(), 1e-4)
        assert [(array.shape, array.dtype) for array in layer.pages] == [
            ((12, max(2, tp), 4, 16), "uint8" if cache == "fp8" else "int8")
        ] * 2 + [((12, max(2, tp), 4), "float32")] * 2

"""MLA alone, against NumPy: several ragged sequences at once, whole and in pieces.

A step of three tokens or fewer attends absorbed. In a longer one TPUs expand keys and values inside
chunks and absorb before them; other platforms expand for long chunks alone, and absorb for all
other tokens. NumPy expands always.
"""

from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels.attention import expanded
from tests import golden
from tests.jaxserve.model.attention import layers
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyDeepseek, Yarn

pytestmark = pytest.mark.unoptimised

SIZES = TinyDeepseek(num_hidden_layers=1, first_k_dense_replace=1)
VARIANTS = {
    "plain": SIZES,
    # Heads of one and of two columns of tiles.
    "biases": replace(SIZES, attention_bias=True, qk_nope_head_dim=128, v_head_dim=256),
    "full query, biases": replace(SIZES, q_lora_rank=None, attention_bias=True),
    "yarn": replace(SIZES, yarn=Yarn(mscale=1.0, mscale_all_dim=1.0)),
    "yarn, mscales": replace(SIZES, yarn=Yarn(40.0, 4096, mscale=0.7, mscale_all_dim=1.2)),
    "epsilon": replace(SIZES, rms_norm_eps=0.5),  # not of the latents' norms
}


class TestMLA(layers.BiasesSuite):
    variants = {name: TinyModel(name, sizes, seed=5) for name, sizes in VARIANTS.items()}  # noqa: RUF012
    cut = ("plain", "yarn, mscales")
    in_bfloat16 = 0.05

    @pytest.mark.parametrize(("name", "tp"), [("biases", 2), ("full query, biases", 4)])
    def test_shares_of_the_devices_add_up(self, name, tp):
        layer = self.layer(name, tp=tp)
        layers.check(
            layers.in_pieces(layer, self.x, layers.MIXED_STEPS), self.expected(name), layers.EXACT
        )
        # Each device has the latent, which all of its heads read.
        (latent,) = layer.pages
        assert latent.shape == (12, tp, 4, 40)
        for device in range(1, tp):
            np.testing.assert_array_equal(np.asarray(latent)[:, device], np.asarray(latent)[:, 0])

    @golden.table("model/latents_in_8_bits.yaml")
    def test_cache_in_8_bits(self, cache, rope, tolerance, pages):
        """A chunk sees its own rows as the cache holds them, so that it does not matter how a
        prompt is cut."""
        layer = self.layer(cache=cache, rope=rope)
        at_once = layers.whole(layer, self.x)
        layers.check(at_once, self.expected(), tolerance)
        # Where a value lies between two of the format's, another order of sums may take the other.
        layers.check(layers.in_pieces(layer, self.x, layers.MIXED_STEPS), at_once, 0.005)
        layers.check(layers.token_by_token(layer, self.x), at_once, 0.005)
        shapes = [((12, 1, 4, width), dtype) for width, dtype in pages]
        found = [(array.shape, array.dtype.name) for array in layer.pages]
        assert found == [*shapes, ((12, 1, 4), "float32")]

    def test_products_in_int8(self):
        """Tokens attend to latents as they are; beside a chunk, whose own rows are in floats."""
        layer = self.layer(cache="int8", rope="bfloat16", int8_products=True)
        layers.check(layers.in_pieces(layer, self.x, layers.MIXED_STEPS), self.expected(), 0.05)


class TestOffTPUs(TestMLA):
    """Chunks of seven tokens or more attend to expanded keys and values, eight at a time."""

    variants = {  # noqa: RUF012
        name: TinyModel(name, replace(sizes, qk_nope_head_dim=4, v_head_dim=2), seed=5)
        for name, sizes in VARIANTS.items()
    }
    cut, platform = ("plain", "biases"), "cpu"

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        monkeypatch.setattr(expanded, "EXPANDED_PAGE", 4)
        monkeypatch.setattr(expanded, "EXPANDED_POSITIONS", 8)

    def test_which_tokens_attend_to_what_is_expanded(self, monkeypatch):
        """In steps with other chunks and decode tokens: the eight tokens of one chunk."""
        own = expanded._expand
        monkeypatch.setattr(expanded, "_expand", lambda *x: [np.nan * a for a in own(*x)])
        found = layers.in_pieces(self.layer(), self.x, layers.MIXED_STEPS)
        nothing = [np.flatnonzero(np.isnan(rows).any(axis=1)).tolist() for rows in found]
        assert nothing == [[], [], [*range(3, 11)]]

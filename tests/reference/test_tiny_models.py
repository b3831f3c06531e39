"""The catalogue itself: its golden files are its own, and what it writes is what it means.

An entry's digest in `golden.json` covers its config.json and every name, shape and value of its
weights, so that nothing else says what these are.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.reference import make_golden
from tests.reference.block_fp8 import block_quantise
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek, TinyQwen3

INDEX = json.loads((make_golden.GOLDEN / "golden.json").read_text())


class TestGoldenFiles:
    def test_one_a_model_and_no_other(self):
        assert list(INDEX["models"]) == list(CATALOGUE)
        files = {path.stem for path in make_golden.GOLDEN.glob("*.safetensors")}
        own = {"deepseek_v4", "qwen3_next", "qwen3_5"}  # written by the modules of these models
        assert files - own == set(CATALOGUE)
        assert INDEX["transformers"] == "5.23.0"

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_belong_to_the_catalogues_weights(self, name):
        model, entry = CATALOGUE[name], INDEX["models"][name]
        assert model.digest() == entry["digest"], "run `python -m tests.reference.make_golden`"
        golden = load_file(make_golden.GOLDEN / f"{name}.safetensors")
        assert golden["logits"].shape == (1 + 9 + 37, VOCAB)
        assert golden["tokens"].shape == (3, make_golden.OUTPUT_TOKENS)
        last = golden["logits"][[0, 9, 46]]
        np.testing.assert_array_equal(last.argmax(axis=-1), golden["tokens"][:, 0])

    def test_no_choice_is_a_close_one(self):
        for name, entry in INDEX["models"].items():
            assert entry["margins"]["logits"] > make_golden.CLOSE_LOGITS, name
            assert entry["margins"].get("experts", 1) > make_golden.CLOSE_EXPERTS, name


class TestBlocks:
    def test_literal(self):
        tensor = np.zeros((2, 130), np.float32)
        tensor[0, :3] = 448, 17, -3.3
        tensor[1, 129] = -896
        written = block_quantise({"a_proj.weight": tensor})
        np.testing.assert_array_equal(written["a_proj.weight_scale_inv"], [[1, 2]])
        values = written["a_proj.weight"].astype(np.float32)
        # 17 lies between 16 and 18, at a tie the even one wins; 3.3 is nearer to 3.25 than to 3.5.
        np.testing.assert_array_equal(values[0, :3], [448, 16, -3.25])
        assert values[1, 129] == -448
        meant = block_quantise({"a_proj.weight": tensor}, dequantised=True)["a_proj.weight"]
        assert meant[1, 129] == -896


class TestRouterMargin:
    def test_softmax_by_logit(self):
        model = TinyModel("x", TinyQwen3("qwen3_moe", num_experts=4, num_experts_per_tok=2))
        logits = np.asarray([[3, 1, 2.5, 0], [1, 2, 3, 4.0]])
        assert make_golden.router_margin(model, logits, None) == 1.0

    def test_groups_count(self):
        sizes = TinyDeepseek(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1)
        logits = np.zeros((1, 4))  # scores of 0.5
        bias = np.asarray([0.4, 0.0, 0.3, 0.05])
        # The groups have 1.4 and 1.35, the first one's experts 0.9 and 0.5.
        assert make_golden.router_margin(TinyModel("x", sizes), logits, bias) == pytest.approx(0.05)

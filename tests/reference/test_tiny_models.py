"""The catalogue itself: its golden files are its own, and what it writes is what it means.

An entry's digest in `golden.json` covers its config.json and every name, shape and value of its
weights, so that nothing else says what these are.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.reference.block_fp8 import block_quantise, block_scales, is_quantised
from tests.reference.catalogue import CATALOGUE, random_model
from tests.reference.make_golden import (
    CLOSE_EXPERTS,
    CLOSE_LOGITS,
    GOLDEN,
    OUTPUT_TOKENS,
    router_margin,
)
from tests.reference.tiny_models import TinyModel, prompts
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek, TinyQwen3

INDEX = json.loads((GOLDEN / "golden.json").read_text())

PROMPT = [46, 58, 43, 20, 74, 31, 75, 5, 58]


def read_with_fp8(path):
    """Does what `load_file` does, which does not know NumPy's eight-bit floats."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    return {
        name: np.frombuffer(
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
            dtypes[entry["dtype"]],
        ).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class TestGoldenFiles:
    def test_one_a_model_and_no_other(self):
        assert list(INDEX["models"]) == list(CATALOGUE)
        files = {path.stem for path in GOLDEN.glob("*.safetensors")}
        assert files == set(CATALOGUE)
        assert INDEX["transformers"] == "5.23.0"

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_belong_to_the_catalogues_weights(self, name):
        model, entry = CATALOGUE[name], INDEX["models"][name]
        assert model.digest() == entry["digest"], "run `python -m tests.reference.make_golden`"
        golden = load_file(GOLDEN / f"{name}.safetensors")
        assert golden["logits"].shape == (1 + 9 + 37, VOCAB)
        assert golden["tokens"].shape == (3, OUTPUT_TOKENS)
        last = golden["logits"][[0, 9, 46]]
        np.testing.assert_array_equal(last.argmax(axis=-1), golden["tokens"][:, 0])

    def test_no_choice_is_a_close_one(self):
        for name, entry in INDEX["models"].items():
            assert entry["margins"]["logits"] > CLOSE_LOGITS, name
            assert entry["margins"].get("experts", 1) > CLOSE_EXPERTS, name

    def test_are_small(self):
        assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 1_500_000

    def test_a_variation_shows_in_the_logits(self):
        """Models that share all weights and differ in an entry of config.json."""
        names = ["deepseek_v3_no_yarn", "deepseek_v3_yarn_plain", "deepseek_v3_epsilon"]
        names += ["deepseek_v3_raw_gates"]
        weights = {str(CATALOGUE[name].tensors()["lm_head.weight"][0]) for name in names}
        assert len(weights) == 1
        logits = [load_file(GOLDEN / f"{name}.safetensors")["logits"] for name in names]
        for index, rows in enumerate(logits):
            for other in logits[:index]:
                assert np.abs(rows - other).max() > 0.01


def test_prompts():
    lengths = [len(prompt) for prompt in prompts()]
    assert lengths == [1, 9, 37]
    assert prompts()[1] == PROMPT
    assert all(2 <= token < VOCAB for prompt in prompts() for token in prompt)


class TestFolders:
    def test_shards(self, tmp_path):
        model = CATALOGUE["qwen3_tied"]
        model.write(tmp_path, shards=2)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        merged = {}
        for file in sorted(set(index["weight_map"].values())):
            merged |= load_file(tmp_path / file)
        tensors = model.tensors()
        assert set(merged) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(merged[name], tensor)

    def test_fp8_blocks(self, tmp_path):
        model = CATALOGUE["deepseek_v3_fp8"]
        stored = read_with_fp8(model.write(tmp_path / "fp8") / "model.safetensors")
        meant = load_file(model.write(tmp_path / "fp32", dequantised=True) / "model.safetensors")
        name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
        assert stored[name].dtype == ml_dtypes.float8_e4m3fn
        assert stored[f"{name}_scale_inv"].shape == (2, 2)  # 192 × 160
        assert {tensor.dtype for tensor in meant.values()} == {np.dtype(np.float32)}
        assert {n for n in stored if not n.endswith("_scale_inv")} == set(meant)
        np.testing.assert_array_equal(
            meant[name][130, 3],
            stored[name][130, 3].astype(np.float32) * stored[f"{name}_scale_inv"][1, 0],
        )
        original = model.tensors()[name]
        np.testing.assert_allclose(meant[name], original, atol=original.max() * 2**-4)


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

    def test_stacked_experts(self):
        assert block_scales(np.ones((3, 130, 256), np.float32)).shape == (3, 2, 2)

    @pytest.mark.parametrize(
        ("name", "quantised"),
        [
            ("model.layers.1.mlp.experts.0.gate_proj.weight", True),
            ("model.layers.1.self_attn.kv_b_proj.weight", True),
            ("model.layers.1.mlp.gate.weight", False),
            ("model.embed_tokens.weight", False),
            ("lm_head.weight", False),
            ("model.layers.3.eh_proj.weight", False),
            ("model.layers.3.shared_head.head.weight", False),
        ],
    )
    def test_what_is_quantised(self, name, quantised):
        assert is_quantised(name, np.ones((2, 2))) == quantised


class TestRouterMargin:
    def test_softmax_by_logit(self):
        model = TinyModel("x", TinyQwen3("qwen3_moe", num_experts=4, num_experts_per_tok=2))
        logits = np.asarray([[3, 1, 2.5, 0], [1, 2, 3, 4.0]])
        assert router_margin(model, logits, None) == 1.0

    def test_groups_count(self):
        sizes = TinyDeepseek(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1)
        logits = np.zeros((1, 4))  # scores of 0.5
        bias = np.asarray([0.4, 0.0, 0.3, 0.05])
        # The groups have 1.4 and 1.35, the first one's experts 0.9 and 0.5.
        assert router_margin(TinyModel("x", sizes), logits, bias) == pytest.approx(0.05)


class TestRandomModels:
    def test_are_the_same_for_the_same_seed(self):
        assert random_model(7) == random_model(7)
        assert len({random_model(seed).sizes for seed in range(40)}) == 40

    def test_can_be_routed(self):
        for seed in range(200):
            sizes = random_model(seed).sizes
            if isinstance(sizes, TinyDeepseek):
                group = sizes.n_routed_experts // sizes.n_group
                assert group >= 2
                assert sizes.topk_group * group >= sizes.num_experts_per_tok
            else:
                assert sizes.num_attention_heads % sizes.num_key_value_heads == 0

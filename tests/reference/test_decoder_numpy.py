"""The NumPy models are transformers' (by the golden files), and no tensor or entry is idle."""

import dataclasses
import itertools
import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.reference.catalogue import CATALOGUE
from tests.reference.decoder_numpy import (
    DecoderNumpy,
    RopeNumpy,
    attend,
    decode_e4m3,
    dequantise,
    keep_best,
    yarn_magnitude,
)
from tests.reference.make_golden import GOLDEN, OUTPUT_TOKENS
from tests.reference.tiny_models import prompts
from tests.reference.tiny_sizes import Yarn


@pytest.mark.parametrize("name", CATALOGUE)
def test_golden(name, tmp_path):
    golden = load_file(GOLDEN / f"{name}.safetensors")
    model = DecoderNumpy.from_folder(CATALOGUE[name].write(tmp_path))
    logits = np.concatenate([model.logits(prompt) for prompt in prompts()])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-5)
    for prompt, tokens in zip(prompts(), golden["tokens"].tolist(), strict=True):
        following = model.logits(prompt + tokens[:-1])[-OUTPUT_TOKENS:]
        assert following.argmax(axis=-1).tolist() == tokens


@pytest.mark.parametrize("name", ["deepseek_v3_biases", "deepseek_v3_full_query", "qwen3_moe_tied"])
def test_every_tensor_matters(name, tmp_path):
    """Random weights must not hide a part of the model: changing any tensor shows."""
    model = DecoderNumpy.from_folder(CATALOGUE[name].write(tmp_path))
    rng, prompt = np.random.default_rng(0), prompts()[2]
    before, tensors = model.logits(prompt), model.tensors
    # A layer's experts together: not every one of them is chosen here. Sorted, so that the
    # random factors are the same in every run.
    for kind in sorted({re.sub(r"experts\.\d+", "experts.*", tensor) for tensor in tensors}):
        pattern = re.escape(kind).replace(r"\*", r"\d+")
        model.tensors = tensors | {
            tensor: values * rng.uniform(0.5, 1.5, values.shape)
            for tensor, values in tensors.items()
            if re.fullmatch(pattern, tensor)
        }
        assert np.abs(model.logits(prompt) - before).max() > 5e-3, kind


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v3", {"routed_scaling_factor": 2.4}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"topk_group": 3}),
        ("deepseek_v3", {"num_experts_per_tok": 2}),
        ("deepseek_v3", {"rms_norm_eps": 1e-3}),
        ("deepseek_v3", {"rope_theta": 50_000.0}),
        ("deepseek_v3", {"yarn": None}),
        ("deepseek_v3", {"yarn": Yarn(mscale=1.0, mscale_all_dim=0.9)}),
        ("kimi_k2", {"yarn": Yarn(32.0, mscale=1.0, mscale_all_dim=1.0)}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe_window", {"sliding_window": 9}),
        ("qwen3_window", {"max_window_layers": 3}),
        ("qwen3_window", {"use_sliding_window": False}),
        ("qwen3_yarn", {"yarn": None}),
    ],
)
def test_every_entry_matters(name, changes, tmp_path):
    model = CATALOGUE[name]
    reference = DecoderNumpy.from_folder(model.write(tmp_path))
    changed = dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, **changes))
    other = type(reference)(json.loads(json.dumps(changed.config())), reference.tensors)
    moved = np.abs(other.logits(prompts()[2]) - reference.logits(prompts()[2])).max()
    assert moved > 3e-3  # thirty times what parity allows


class TestParts:
    def test_every_e4m3_number(self):
        data = bytes(range(256))
        expected = np.frombuffer(data, ml_dtypes.float8_e4m3fn).astype(np.float64)
        np.testing.assert_array_equal(decode_e4m3(data), expected)

    def test_dequantise(self):
        tensors = {
            "x.weight": np.ones((3, 5)),
            "x.weight_scale_inv": np.asarray([[1, 2], [3, 4.0]]),
        }
        np.testing.assert_array_equal(
            dequantise(tensors, [2, 4])["x.weight"],
            [[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [3, 3, 3, 3, 4]],
        )

    def test_turns_neighbours_or_halves(self):
        rope = RopeNumpy({"rope_theta": 100.0}, 4)  # frequencies 1 and 1/10
        x = np.zeros((3, 1, 4))
        x[2, 0] = 1, 0, 1, 0
        cos, sin = np.cos([2, 0.2]), np.sin([2, 0.2])
        turned = rope.turn(x, interleaved=True)[2, 0]
        np.testing.assert_allclose(turned, [cos[0], sin[0], cos[1], sin[1]])
        halves = rope.turn(x, interleaved=False)[2, 0]
        np.testing.assert_allclose(halves, [cos[0] - sin[0], 0, sin[0] + cos[0], 0])

    @pytest.mark.parametrize(
        ("theta", "factor", "betas", "first", "last"),
        [(10_000.0, 40, (32, 1), 10, 23), (50_000.0, 32, (1, 1), 19, 20)],
    )
    def test_yarn_of_the_released_models(self, theta, factor, betas, first, last):
        """DeepSeek-V3's ramp lies between the pairs 10 and 23, Kimi K2's between 19 and 20."""
        scaling = {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": 4096,
            "beta_fast": betas[0],
            "beta_slow": betas[1],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        rope = RopeNumpy({"rope_theta": theta, "rope_scaling": scaling}, 64)
        ratio = rope.frequencies / theta ** (-np.arange(32) / 32)
        np.testing.assert_allclose(ratio[: first + 1], 1)
        np.testing.assert_allclose(ratio[last:], 1 / factor)
        if last - first > 1:
            assert 1 / factor < ratio[last - 1] < ratio[first + 1] < 1
        assert rope.magnitude == 1.0
        scale = rope.score_factor / 192**0.5
        assert scale == pytest.approx({40: 0.135234, 32: 0.130861}[factor], abs=1e-6)

    def test_yarn_magnitude(self):
        assert yarn_magnitude(1.0, 5.0) == 1.0
        assert yarn_magnitude(np.e, 2.0) == pytest.approx(1.2)

    @pytest.mark.parametrize(
        ("window", "seen"), [(0, [[0], [0, 1], [0, 1, 2]]), (2, [[0], [0, 1], [1, 2]])]
    )
    def test_a_window_counts_the_token_itself(self, window, seen):
        query, key = np.zeros((3, 2, 4)), np.zeros((3, 1, 4))
        value = np.eye(3)[:, None]  # where a token looks
        output = attend(query, key, value, 1.0, window)
        for token, head in itertools.product(range(3), range(2)):
            assert np.flatnonzero(output[token, head]).tolist() == seen[token]

    def test_keep_best(self):
        assert keep_best(np.asarray([[1, 3, 2.0]]), 2).tolist() == [[False, True, True]]

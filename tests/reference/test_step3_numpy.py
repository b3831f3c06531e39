"""The NumPy Step-3 itself: what it is made of, and what must hold whatever the weights are."""

import ml_dtypes
import numpy as np
import pytest

from tests.reference.step3_numpy import (
    Cache,
    Step3Numpy,
    rotate,
)
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

TOKENS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return Step3Numpy.from_folder(write_tiny_step3(folder, TinyStep3(mtp=True)))


class TestParts:
    """The parts that the other NumPy models, which golden files check, do not share."""

    def test_rotate_turns_element_i_with_element_i_plus_half(self):
        # theta 100 and head_dim 4: frequencies 1 and 1/10.
        x = np.asarray([[[1.0, 1.0, 0.0, 0.0]]])
        expected = [np.cos(2), np.cos(0.2), np.sin(2), np.sin(0.2)]
        np.testing.assert_allclose(rotate(x, np.asarray([2]), 100.0)[0, 0], expected)

    def test_gates_are_raw_probabilities(self):
        config = TinyStep3().config()
        router = {"moe.gate.weight": np.log([[1.0], [2.0], [4.0], [1.0], [2.0]])}
        experts, weights = Step3Numpy(config, router).route("moe", np.ones((1, 1)))
        np.testing.assert_array_equal(experts, [[2, 1, 4]])
        np.testing.assert_allclose(weights, [[0.4, 0.2, 0.2]])


class TestModel:
    def test_a_token_sees_nothing_later(self, model):
        np.testing.assert_allclose(model.logits(TOKENS)[:5], model.logits(TOKENS[:5]), rtol=1e-9)

    def test_cached_keys_and_values_change_nothing(self, model):
        cache = Cache()
        parts = [model.hidden(part, cache) for part in (TOKENS[:5], TOKENS[5:6], TOKENS[6:])]
        np.testing.assert_allclose(
            np.concatenate(parts), model.hidden(TOKENS), rtol=1e-9, atol=1e-12
        )

    def test_greedy_is_the_best_of_the_logits(self, model):
        tokens, margins = model.greedy_with_margins(TOKENS, 6)
        logits = model.logits(TOKENS + tokens)[len(TOKENS) - 1 : -1]
        assert tokens == list(logits.argmax(axis=-1)) == model.greedy(TOKENS, 6)
        top = np.sort(logits, axis=-1)
        np.testing.assert_allclose(margins, top[:, -1] - top[:, -2], rtol=1e-6)

    def test_float32_agrees(self, model, tmp_path):
        folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True))
        logits = Step3Numpy.from_folder(folder, np.float32).logits(TOKENS)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, model.logits(TOKENS), atol=5e-5)

    def test_every_tensor_matters(self, model):
        """Random weights must not hide a part of the model: changing any tensor shows."""
        rng = np.random.default_rng(0)
        tokens = list(rng.integers(0, 160, 16))
        before = model.logits(tokens), model.mtp_logits(tokens)
        for name, tensor in model.tensors.items():
            changed = model.tensors | {name: tensor * rng.uniform(0.5, 1.5, tensor.shape)}
            other = Step3Numpy(TinyStep3(mtp=True).config(), changed)
            if name.startswith("model.layers.4."):
                moved = other.mtp_logits(tokens) - before[1]
            else:
                moved = other.logits(tokens) - before[0]
            assert np.abs(moved).max() > 1e-2, name


class TestMultiTokenPrediction:
    def test_row_i_sees_the_tokens_up_to_i_plus_1(self, model):
        logits = model.mtp_logits(TOKENS)
        assert logits.shape == (len(TOKENS) - 1, 160)
        np.testing.assert_allclose(model.mtp_logits(TOKENS[:5]), logits[:4], rtol=1e-9)

    def test_the_first_position_does_not_matter(self, model):
        np.testing.assert_allclose(
            model.mtp_logits(TOKENS, first_position=1), model.mtp_logits(TOKENS), rtol=1e-9
        )

    def test_own_copies_of_embedding_and_head(self, model, tmp_path):
        folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True, mtp_repeats_head=True))
        other = Step3Numpy.from_folder(folder)
        np.testing.assert_array_equal(other.mtp_logits(TOKENS), model.mtp_logits(TOKENS))

    def test_absent(self, model, tmp_path):
        assert model.has_mtp
        assert not Step3Numpy.from_folder(write_tiny_step3(tmp_path)).has_mtp


class TestTinyCheckpoints:
    @pytest.mark.parametrize(
        "form",
        [{"vision": True}, {"moe_layers_as": list}, {"shards": 3}, {"vision": True, "shards": 2}],
    )
    def test_forms_of_the_same_model(self, form, tmp_path):
        plain = Step3Numpy.from_folder(write_tiny_step3(tmp_path / "plain"))
        other = Step3Numpy.from_folder(write_tiny_step3(tmp_path / "other", **form))
        np.testing.assert_array_equal(other.logits(TOKENS), plain.logits(TOKENS))

    def test_bfloat16(self, tmp_path):
        folder = write_tiny_step3(tmp_path, dtype="bfloat16")
        tensors = Step3Numpy.from_folder(folder).tensors
        for name, tensor in TinyStep3().tensors().items():
            rounded = tensor.astype(ml_dtypes.bfloat16).astype(np.float64)
            np.testing.assert_array_equal(tensors[name], rounded, err_msg=name)

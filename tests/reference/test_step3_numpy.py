"""The NumPy Step-3 itself: what must hold whatever the weights are.

Its parts are those of the other NumPy models, which golden files check, but for the router's.
"""

import numpy as np
import pytest

from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

TOKENS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return Step3Numpy.from_folder(write_tiny_step3(folder, TinyStep3(mtp=True)))


def test_gates_are_raw_probabilities():
    router = {"moe.gate.weight": np.log([[1.0], [2.0], [4.0], [1.0], [2.0]])}
    experts, weights = Step3Numpy(TinyStep3().config(), router).choose("moe", np.ones((1, 1)))
    np.testing.assert_array_equal(experts, [[2, 1, 4]])
    np.testing.assert_allclose(weights, [[0.4, 0.2, 0.2]])


def test_a_token_sees_nothing_later(model):
    """Row i of the module's sees the tokens up to i + 1."""
    np.testing.assert_allclose(model.logits(TOKENS)[:5], model.logits(TOKENS[:5]), rtol=1e-9)
    logits = model.mtp_logits(TOKENS)
    assert logits.shape == (len(TOKENS) - 1, 160)
    np.testing.assert_allclose(model.mtp_logits(TOKENS[:5]), logits[:4], rtol=1e-9)


def test_every_tensor_matters(model):
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


def test_own_copies_of_embedding_and_head(model, tmp_path):
    folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True, mtp_repeats_head=True))
    other = Step3Numpy.from_folder(folder)
    np.testing.assert_array_equal(other.mtp_logits(TOKENS), model.mtp_logits(TOKENS))

"""The NumPy models are transformers' (by the golden files), and no tensor or entry is idle."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import golden
from tests.reference.catalogue import CATALOGUE
from tests.reference.decoder_numpy import DecoderNumpy
from tests.reference.make_golden import GOLDEN, OUTPUT_TOKENS
from tests.reference.tiny_models import prompts
from tests.reference.tiny_sizes import Yarn


@pytest.mark.parametrize("name", CATALOGUE)
def test_golden(name, tmp_path):
    stored = load_file(GOLDEN / f"{name}.safetensors")
    model = DecoderNumpy.from_folder(CATALOGUE[name].write(tmp_path))
    logits = np.concatenate([model.logits(prompt) for prompt in prompts()])
    np.testing.assert_allclose(logits, stored["logits"], rtol=0, atol=2e-5)
    for prompt, tokens in zip(prompts(), stored["tokens"].tolist(), strict=True):
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


@golden.table("reference/entries_that_matter.yaml")
def test_every_entry_matters(name, changes, tmp_path):
    if changes.get("yarn"):
        changes = {"yarn": Yarn(**changes["yarn"])}
    model = CATALOGUE[name]
    reference = DecoderNumpy.from_folder(model.write(tmp_path))
    changed = dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, **changes))
    other = type(reference)(json.loads(json.dumps(changed.config())), reference.tensors)
    moved = np.abs(other.logits(prompts()[2]) - reference.logits(prompts()[2])).max()
    assert moved > 3e-3  # thirty times what parity allows

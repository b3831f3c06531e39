"""Logits that are not numbers end the request that has them, and no other."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.engine.build import build_engine
from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised

BROKEN = 7
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = layouts.write_model(tmp_path_factory.mktemp("nan"))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            table = np.array(tensors["model.embed_tokens.weight"])
            table[BROKEN] = np.nan
            save_file({**tensors, "model.embed_tokens.weight": table}, file)
    engine = build_engine(layouts.deployment(folder, {**layouts.COLOCATED, "cache.prefix": False}))
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_with_an_error_and_is_counted(engine, temperature):
    params = layouts.SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True)
    before = engine.load().invalid_logits
    collector = layouts.Collector()
    healthy = collector.submit(engine, [3, 4, 5], params)
    broken = collector.submit(engine, [3, BROKEN, 5], params)
    outputs = collector.wait()
    assert outputs[healthy].finish_reason == "length"
    assert outputs[broken].finish_reason == "error"
    assert outputs[broken].token_ids == []
    assert "logits for the next token are not finite" in outputs[broken].error
    assert engine.load().invalid_logits == before + 1
    layouts.idle(engine)

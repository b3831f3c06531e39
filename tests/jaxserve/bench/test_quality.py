"""The bench's scores against NumPy's; what the formats cost is not judged here."""

import math

import numpy as np
import pytest

from jaxserve.bench import quality
from jaxserve.bench.quality import BASE
from jaxserve.bench.workers import BenchError
from jaxserve.fleet.assembly import build_runtime
from tests.conftest import REPOSITORY
from tests.reference.step3_numpy import Step3Numpy

DEMO = REPOSITORY / "configs" / "demo"


@pytest.mark.nightly
@pytest.mark.unoptimised
def test_score_is_that_of_the_numpy_model():
    """Two texts, the longer one of two steps; BF16 against FP64, so to a few thousandths."""
    texts = quality.held_out(DEMO, files=3, tokens=150)[1:]
    assert [len(text.token_ids) for text in texts] == [151, 151]
    runtime = build_runtime(quality.deployment(texts, BASE))
    score = quality.score(runtime, texts)
    model, nats, choices = Step3Numpy.from_folder(DEMO), 0.0, []
    for text in texts:
        logits = model.logits(text.token_ids)[:-1]
        chance = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        nats -= float(np.log(chance[np.arange(150), text.token_ids[1:]]).sum())
        choices.append(logits.argmax(axis=1))
    bits = nats / math.log(2) / sum(text.size for text in texts)
    assert score.bits == pytest.approx(bits, rel=5e-3)
    assert len(score.choices) == 300
    assert np.mean(score.choices == np.concatenate(choices)) > 0.95


def test_texts_are_counted_in_bytes_and_have_to_be_listed(tmp_path):
    assert quality.held_out(DEMO, files=2, tokens=40)[1].size > 41
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    with pytest.raises(BenchError, match=r"no held-out text: .*held_out\.txt"):
        quality.held_out(tmp_path, files=1, tokens=8)

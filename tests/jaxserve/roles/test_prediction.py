"""Drafts of prediction modules are those of the NumPy models, in all modes."""

import dataclasses

import numpy as np
import pytest

from jaxserve.fleet.assembly import build_runtime
from jaxserve.roles.step_arrays import REJECTED
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from tests.jaxserve import layouts
from tests.reference.decoder_numpy import DecoderNumpy
from tests.reference.prediction_numpy import propose
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek, TinyStep3p5
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

STEP3 = dataclasses.replace(layouts.SIZES, mtp=True)
DEEPSEEK = TinyModel(
    "two modules", TinyDeepseek(num_hidden_layers=2, num_nextn_predict_layers=2), seed=3
)
DRAFTS = 3
ON = {"speculative.method": "mtp", "speculative.drafts": DRAFTS}
TIE = 1e-4

COLOCATED = {"mode": "colocated", "attention.dp": 2}
AFD = {"attention.dp": 2, "attention.tp": 2, "ffn.ep": 2, "ffn.exchange": "alltoall"}
STEP = AFD | {"attention.tp": 1, "pipeline": "step"}


class Slots:
    """Sequences in slots of DP group 1, stepped by hand."""

    def __init__(self, folder, overrides):
        self.runtime = build_runtime(layouts.deployment(folder, overrides | ON))
        self.bucket = next(bucket for bucket in self.runtime.buckets if bucket.drafts)
        self.steps = 0

    def entries(self, slot: int, tokens: int):
        """Cache entries of a slot's tokens, [layers, tokens, width], the modules' layers last."""
        layers = []
        for array in self.runtime.driver.kv_arrays().load():
            groups = np.asarray(array).reshape(2, -1, 160, 8, array.shape[-1])
            layers += list(groups[1])  # all of them, or one
        pages = [slot + 5 * page for page in range(-(-tokens // 8))]
        return np.stack([layer[pages].reshape(-1, layer.shape[-1])[:tokens] for layer in layers])

    def step(self, fed: dict[int, tuple[list[int], int]], drafts: int = 0, upcoming=None):
        """Feeds tokens to slots; returns the sampled tokens and drafts of each.

        Args:
          fed: By slot, the tokens, and how many tokens are in the cache then.
          drafts: How many of the tokens of each slot are drafts.
          upcoming: By slot, the prompt's tokens behind those that are fed; such a slot samples
            nothing.
        """
        upcoming = upcoming or {}
        rows = [
            SequenceRow(
                slot=slot,
                token_ids=tokens,
                kv_length=length,
                page_ids=[slot + 5 * page for page in range(4)],
                sample=slot not in upcoming,
                drafts=drafts,
                upcoming=upcoming.get(slot, []),
            )
            for slot, (tokens, length) in fed.items()
        ]
        plan = plan_of_rows(0, self.steps, self.bucket, [[], rows], slots=5)
        self.steps += 1
        self.runtime.driver.begin(plan)
        finished = self.runtime.driver.advance()
        sampled, proposed = np.asarray(finished.sampled)[1], np.asarray(finished.last)[1]
        return {slot: (sampled[slot].tolist(), proposed[slot].tolist()) for slot in fed}


def modes(other: str):
    """All, of which the other runs in the matrix alone, and a whole step nightly."""
    for name, overrides in (("colocated", COLOCATED), ("afd", AFD), ("step", STEP)):
        marks = {other: [pytest.mark.matrix], "step": [pytest.mark.nightly]}.get(name, [])
        yield pytest.param(overrides, id=name, marks=marks)


@pytest.mark.parametrize("overrides", [*modes("colocated")])
def test_one_module(overrides, tmp_path):
    folder = write_tiny_step3(tmp_path, STEP3, seed=layouts.SEED)
    model, slots = Step3Numpy.from_folder(folder), Slots(folder, overrides)
    texts = {0: [7], 2: layouts.PROMPTS[11], 3: layouts.PROMPTS[10]}
    made = slots.step({slot: (text, len(text)) for slot, text in texts.items()})
    checked = 0
    for slot, (sampled, proposed) in made.items():
        expected = propose(model, texts[slot], 1, DRAFTS)
        if expected.margin > TIE:
            assert (sampled, proposed) == ([expected.token, *[REJECTED] * DRAFTS], expected.drafts)
            checked += 1
    assert checked == 3

    # Of every sequence as many drafts hold as its slot's number says, but of slot 2 all.
    fed = {}
    for slot, text in texts.items():
        token = made[slot][0][0]
        right = model.greedy([*text, token], DRAFTS)
        held = DRAFTS if slot == 2 else slot // 3
        drafts = right[:held] + [(token + 1) % 161 for token in right[held:]]
        fed[slot] = [token, *drafts], len(text) + 1 + DRAFTS
        texts[slot] = [*text, token, *right[:held]]
    for slot, (sampled, proposed) in slots.step(fed, DRAFTS).items():
        expected = propose(model, texts[slot], 1, DRAFTS)
        assert expected.margin > TIE
        held = [token for token in sampled if token != REJECTED]
        assert held[:-1] == texts[slot][len(texts[slot]) - len(held) + 1 :]
        assert held[-1] == expected.token
        assert proposed == expected.drafts


def check_proposals(folder, overrides, draw):
    """Compares what the modules of a model propose after three texts; returns the slots."""
    model, slots = DecoderNumpy.from_folder(folder), Slots(folder, overrides)
    texts = {slot: draw.integers(0, VOCAB, 3 + 4 * slot).tolist() for slot in (0, 1, 2)}
    made = slots.step({slot: (text, len(text)) for slot, text in texts.items()})
    for slot, (sampled, proposed) in made.items():
        expected = propose(model, texts[slot], overrides["speculative.modules"], DRAFTS)
        assert expected.margin > TIE
        assert (sampled[0], proposed) == (expected.token, expected.drafts)
    return slots


@pytest.mark.parametrize("overrides", [*modes("colocated")])
def test_three_modules_with_heads_of_their_own(overrides, tmp_path):
    folder = TinyModel("step3p5", TinyStep3p5(), seed=1).write(tmp_path)
    more = {"speculative.modules": 3, "ffn.exchange": "gather"}
    check_proposals(folder, overrides | more, np.random.default_rng(0))


@pytest.mark.parametrize("overrides", [*modes("afd")])
def test_two_modules(overrides, tmp_path):
    more = {"speculative.modules": 2, "ffn.exchange": "gather", "attention.tp": 1}
    draw = np.random.default_rng(0)
    slots = check_proposals(DEEPSEEK.write(tmp_path), overrides | more, draw)

    # Behind a chunk comes the rest of its prompt, and not what the next row of the step is fed.
    prompt = draw.integers(0, VOCAB, 24).tolist()
    made = slots.step({4: (prompt, 24)})
    for start, stop in ((0, 7), (7, 8), (8, 23)):
        known = [*prompt[stop : stop + 2], -1][:2]
        fed = {2: (prompt[start:stop], stop), 3: ([start, 2], 2)}
        slots.step(fed, upcoming={2: known})
    again = slots.step({2: (prompt[23:], 24), 3: ([1, 2], 2)})
    assert again[2][0] == made[4][0]
    whole, chunks = slots.entries(4, 24), slots.entries(2, 24)
    assert (len(whole), whole.any(axis=2).all()) == (4, True)
    np.testing.assert_allclose(chunks[:-1], whole[:-1], atol=1e-4)
    # Of the last token but one the second module had to guess what comes behind the prompt.
    known = [*range(22), 23]
    np.testing.assert_allclose(chunks[-1][known], whole[-1][known], atol=1e-4)

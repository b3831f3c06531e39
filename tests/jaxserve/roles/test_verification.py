"""Tokens of steps with drafts come with the probabilities that their requests ask for.

A model of a few tokens whose logits depend on the token before; drafts are drawn at random. What
is sampled after the last token, and after a draft that holds, is compared with probabilities that
NumPy computes, by a chi-square test over seeds that are fixed.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.roles import sampling
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import REJECTED, BatchLayout, LaneState, rules_array
from jaxserve.roles.step_plan import SlotRules
from jaxserve.roles.token_programs import TokenPrograms
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from tests.jaxserve.model import test_sampler

SLOTS, ROUNDS = 1024, 20
VOCAB, TOKENS = 33, 7  # those beyond never come
LAST, PROMPT = 2, 3
LOGITS = 1.5 * np.random.default_rng(3).standard_normal((VOCAB, VOCAB)).astype(np.float32)
LOGITS[:, TOKENS:] = -1e9
BIASES = {1: 1.25, 5: -0.75}

CASES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {"temperature": 1.0, "repetition": 1.4, "presence": 0.3, "frequency": 0.6},
    "biases": {"temperature": 0.9, "biases": BIASES},
}


def probabilities(before: list[int], case: dict) -> np.ndarray:
    """Probabilities of the token after these generated ones."""
    logits = LOGITS[before[-1]].astype(np.float64)
    times = np.bincount(before, minlength=VOCAB)
    repetition = case.get("repetition", 1.0)
    seen = np.where(logits > 0, logits / repetition, logits * repetition)
    logits = np.where(times > 0, seen, logits)
    logits = logits - case.get("presence", 0.0) * (times > 0) - case.get("frequency", 0.0) * times
    for token, bias in case.get("biases", {}).items():
        logits[token] += bias
    return test_sampler.probabilities(logits, **options_of(case))


def options_of(case: dict) -> dict:
    """Options of sampling that a case has beside rules."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: case[name] for name in names if name in case}


@pytest.fixture(scope="module")
def choose():
    """The program that draws by rules, in steps with a draft: of logits, batch and rules."""
    bucket = Bucket(2 * SLOTS, 1, 1)
    programs = TokenPrograms.__new__(TokenPrograms)
    programs.config = SimpleNamespace(vocab=VOCAB, modules=0)
    programs.slots, programs.groups, programs.tables = SLOTS, 1, 1
    programs.divided, programs.logits_spec = False, PartitionSpec("dp")
    programs.mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    body = sampling.choose(programs, bucket).body
    return jax.jit(jax.vmap(body, axis_name="dp"))


def step(case: dict, drafts: np.ndarray, seed: int):
    """Batch and rules of a step in which every slot feeds its last token and a draft."""
    biases = case.get("biases", {})
    rules = SlotRules(
        repetition_penalty=case.get("repetition", 1.0),
        presence_penalty=case.get("presence", 0.0),
        frequency_penalty=case.get("frequency", 0.0),
        counts_from=PROMPT,
        fresh=True,
        bias_ids=np.asarray([*biases], "<i4").tobytes(),
        biases=np.asarray([*biases.values()], "<f4").tobytes(),
    )
    options = options_of(case) | {"sample": True, "rules": rules, "drafts": 1}
    rows = [
        SequenceRow(slot, [LAST, int(draft)], PROMPT + 2, [0], seed=seed * SLOTS + slot, **options)
        for slot, draft in enumerate(drafts)
    ]
    plan = plan_of_rows(0, 0, Bucket(2 * SLOTS, 1, 1), [rows], slots=SLOTS)
    return LaneState(1, SLOTS, 1).step(plan).batch, rules_array(plan, 1, SLOTS, VOCAB)


@pytest.mark.parametrize("name", CASES)
def test_probabilities(name, choose):
    from scipy.stats import chisquare  # imports half of scipy

    case, random = CASES[name], np.random.default_rng(11)
    batch, rules = step(case, np.zeros(SLOTS), 0)
    fields = BatchLayout(2 * SLOTS, SLOTS).fields(batch)
    zeros = np.zeros((1, SLOTS, VOCAB), np.int32)
    first, second = np.zeros(VOCAB), np.zeros((VOCAB, VOCAB))
    for turn in range(ROUNDS):
        drafts = random.integers(0, TOKENS, SLOTS)
        fields["token_ids"][0, 1::2] = drafts
        fields["seed"][0] = turn * SLOTS + np.arange(SLOTS)
        logits = np.stack([np.broadcast_to(LOGITS[LAST], (SLOTS, VOCAB)), LOGITS[drafts]], axis=1)
        given = batch[:, None], zeros, rules[:, None]
        made = choose(logits.reshape(1, -1, VOCAB), zeros[:, None, :, 0], *given)
        last, sampled, counts, lengths = jax.device_get(made)
        run = sampled[0, 0]
        holds = run[:, 0] == drafts
        np.testing.assert_array_equal(run[:, 1] == REJECTED, ~holds)
        np.testing.assert_array_equal(last[0, 0], np.where(holds, run[:, 1], run[:, 0]))
        np.testing.assert_array_equal(lengths[0, 0], PROMPT + 1 + holds)
        fed = np.eye(VOCAB, dtype=np.int32)
        np.testing.assert_array_equal(counts[0], fed[LAST] + holds[:, None] * fed[drafts])
        first += np.bincount(run[:, 0], minlength=VOCAB)
        np.add.at(second, (drafts[holds], run[holds, 1]), 1)
    assert first.sum() >= 20_000
    assert second.sum() > 2_000
    follows = np.stack([probabilities([LAST, token], case) for token in range(VOCAB)])
    expected = second.sum(axis=1) @ follows
    for found, wanted in (
        (first, first.sum() * probabilities([LAST], case)),
        (second.sum(axis=0), expected),
    ):
        possible = wanted > 0
        assert not found[~possible].any()
        assert chisquare(found[possible], wanted[possible]).pvalue > 0.001

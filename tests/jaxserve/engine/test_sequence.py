import numpy as np
import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.sequence import BANNED, RequestRules, bitmask

EOS = frozenset({3, 40})


def of_step(generated=0, fresh=False, samples=True, allowed=b"", prompt=(5, 64, 5), **params):
    request = Request(
        request_id="a", prompt=list(prompt), params=SamplingParams(**params), eos_token_ids=EOS
    )
    rules = RequestRules(request)
    return rules.of_step(generated=generated, fresh=fresh, samples=samples, allowed=allowed)


def biases(rules):
    ids = np.frombuffer(rules.bias_ids, "<i4").tolist()
    return dict(zip(ids, np.frombuffer(rules.biases, "<f4").tolist(), strict=True))


@pytest.mark.parametrize(
    ("ids", "words"), [([0], 1), ([0, 31], 1), ([0, 32], 2), ([0, 63], 2), ([0, 5, 31, 64], 3)]
)
def test_a_mask_has_the_words_that_its_largest_id_needs(ids, words):
    bits = np.unpackbits(np.frombuffer(bitmask(ids), np.uint8), bitorder="little")
    assert len(bits) == 32 * words
    assert np.flatnonzero(bits).tolist() == ids


def test_nothing_asked_nothing_given():
    assert of_step() is None
    assert of_step(fresh=True) is None
    assert of_step(samples=False, logit_bias={4: 1.0}, allowed=b"abcd") is None


def test_end_ids_are_banned_until_min_tokens():
    params = {"min_tokens": 2, "stop_token_ids": (7,), "logit_bias": {4: 1.5}}
    ban = np.float32(BANNED)
    for generated in (0, 1):
        rules = of_step(generated=generated, **params)
        assert biases(rules) == {4: 1.5, 3: ban, 7: ban, 40: ban}
    assert biases(of_step(generated=2, **params)) == {4: 1.5}
    assert biases(of_step(generated=1, ignore_eos=True, **params)) == {4: 1.5, 7: ban}
    assert of_step(generated=2, min_tokens=2) is None


def test_a_token_has_one_bias_at_most():
    rules = of_step(min_tokens=1, logit_bias={40: 1.5, 4: 2.0})
    assert biases(rules) == {40: np.float32(BANNED), 4: 2.0, 3: np.float32(BANNED)}
    assert len(rules.bias_ids) == 3 * 4


def test_penalties_are_in_every_step_and_the_prompt_in_the_first():
    for samples in (True, False):
        rules = of_step(samples=samples, repetition_penalty=1.5)
        assert (rules.repetition_penalty, rules.counts_from) == (1.5, 3)
        assert (rules.fresh, rules.prompt) == (False, b"")
    rules = of_step(fresh=True, samples=False, repetition_penalty=1.5)
    assert (rules.fresh, rules.prompt) == (True, bitmask([5, 64]))
    rules = of_step(fresh=True, presence_penalty=0.5)
    assert (rules.fresh, rules.prompt, rules.presence_penalty) == (True, b"", 0.5)


def test_the_mask_goes_where_a_token_is_sampled():
    assert of_step(allowed=b"abcd").allowed == b"abcd"
    assert of_step(allowed=b"abcd", samples=False, presence_penalty=1.0).allowed == b""

"""Options that only some requests ask for: by NumPy, token for token."""

import math

import numpy as np
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import InvalidRequestError
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Collector
from tests.reference.step3_numpy import Step3Numpy

pytestmark = pytest.mark.unoptimised

VOCAB = layouts.SIZES.vocab_size
TOKENS = 20
PROMPTS = layouts.PROMPTS


class Residues:
    """A grammar: the next token's rest by 5 follows from the last token; ends after six tokens."""

    def __init__(self):
        self.tokens = []

    @property
    def finished(self):
        return len(self.tokens) == 6

    def allowed(self):
        rest = (3 * self.tokens[-1] + 1) % 5 if self.tokens else 2
        return [token for token in range(VOCAB) if token % 5 == rest]

    def mask(self):
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in self.allowed():
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return words

    def accept(self, token_id):
        assert token_id in self.allowed()
        self.tokens.append(token_id)


OPTIONS = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.7, "logprobs": 0},
    {"repetition_penalty": 1.5},
    {"presence_penalty": -1.0, "frequency_penalty": 1.0, "repetition_penalty": 0.8},
    {"logit_bias": {7: 100.0}, "presence_penalty": 0.5, "logprobs": 2},
    {"logit_bias": dict.fromkeys(range(0, VOCAB, 3), -100.0), "logprobs": 20},
    {"min_tokens": 6, "stop_token_ids": tuple(range(60)), "prompt_logprobs": 1},
    {"grammar": Residues},
    {"grammar": Residues, "repetition_penalty": 1.4, "min_tokens": 2, "logprobs": 1},
    {"prompt_logprobs": 4, "logprobs": 3},
    {"logprob_token_ids": (5, VOCAB - 1), "logprobs": 2},
]


def params_of(number):
    options = dict(OPTIONS[number % len(OPTIONS)])
    if "grammar" in options:
        options["grammar"] = options["grammar"]()
    return SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, **options)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def expected(model, prompt, params):
    """Tokens and raw log-probabilities, also of the prompt's, from the definitions."""
    tokens, logs = list(prompt), []
    stops, grammar = set(params.stop_token_ids), params.grammar
    while len(tokens) < len(prompt) + params.max_tokens:
        raw = model.logits(tokens)[-1].astype(np.float64)
        logits, generated = raw.copy(), tokens[len(prompt) :]
        for token in set(tokens):
            factor = params.repetition_penalty
            logits[token] = raw[token] / factor if raw[token] > 0 else raw[token] * factor
        for token in generated:
            logits[token] -= params.frequency_penalty
        for token in set(generated):
            logits[token] -= params.presence_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if len(generated) < params.min_tokens:
            logits[list(stops)] = -1e9
        if grammar is not None:
            forbidden = np.ones(VOCAB, bool)
            forbidden[grammar.allowed()] = False
            logits[forbidden] = -np.inf
        token = int(np.argmax(logits))
        if token in stops:
            break
        tokens.append(token)
        logs.append(log_softmax(raw))
        if grammar is not None:
            grammar.accept(token)
            if grammar.finished:
                break
    rows = model.logits(prompt)
    prompt_logs = [log_softmax(row)[t] for row, t in zip(rows[:-1], prompt[1:], strict=True)]
    return tokens[len(prompt) :], logs, prompt_logs


@pytest.fixture(scope="module")
def wanted(tiny_model):
    model = Step3Numpy.from_folder(tiny_model)
    return [expected(model, prompt, params_of(n)) for n, prompt in enumerate(PROMPTS)]


def run(engine):
    """Every prompt with its options, all at once; the outputs by number."""
    collector, numbers = Collector(), range(len(PROMPTS))
    for number in numbers:
        params = params_of(number)
        collector.submit(engine, PROMPTS[number], params, request_id=str(number))
    collector.wait()
    return {number: collector.outputs(str(number)) for number in numbers}


def check(outputs, wanted):
    for number, news in outputs.items():
        tokens, logs, prompt_logs = wanted[number]
        params, case = params_of(number), f"prompt {number}, {OPTIONS[number % len(OPTIONS)]}"
        got = [token for output in news for token in output.token_ids]
        assert got == tokens, case
        reported = [item for output in news for item in output.logprobs]
        assert bool(reported) == (params.logprobs is not None), case
        if reported:
            assert [item.token_id for item in reported] == tokens
            own = [row[token] for row, token in zip(logs, tokens, strict=True)]
            np.testing.assert_allclose([item.logprob for item in reported], own, atol=2e-4)
            for item in reported:
                if not params.logprob_token_ids:
                    check_top(item, params.logprobs)
            for item, row in zip(reported, logs, strict=True):
                for token, log in item.top:
                    np.testing.assert_allclose(log, row[token], atol=2e-4)
            if ids := params.logprob_token_ids:
                assert {tuple(token for token, _ in item.top) for item in reported} == {ids}
        prompts = [o.prompt_logprobs for o in news if o.prompt_logprobs is not None]
        assert len(prompts) == (params.prompt_logprobs is not None), case
        for first, *rest in prompts:
            assert first is None
            assert [item.token_id for item in rest] == PROMPTS[number][1:]
            np.testing.assert_allclose([item.logprob for item in rest], prompt_logs, atol=2e-4)
            for item in rest:
                check_top(item, params.prompt_logprobs)


def check_top(item, count):
    ids, logs = [token for token, _ in item.top], [log for _, log in item.top]
    assert len(set(ids)) == count
    assert logs == sorted(logs, reverse=True)
    if count and item.token_id in ids:
        assert logs[ids.index(item.token_id)] == item.logprob
    elif count:
        assert item.logprob <= logs[-1]


@pytest.mark.parametrize("name", ["colocated", "afd"])
def test_two_lanes(name, request, wanted):
    """Twice: the second time all prompts are in the prefix cache."""
    with layouts.serving(request.getfixturevalue(f"{name}_runtime")) as engine:
        check(run(engine), wanted)
        before = engine.schedulers[0].queue.prompt_tokens_found
        outputs = run(engine)
        check(outputs, wanted)
        assert engine.schedulers[0].queue.prompt_tokens_found > before + 200
    found = {number: news[0].cached_tokens for number, news in outputs.items()}
    assert found[1] == 64, "70 tokens, 8 a page"
    assert found[10] == found[7] == 0, "scored prompts are computed"


def test_preempted_and_recomputed(afd_runtime, tiny_model, wanted):
    for prefix in (True, False):
        overrides = {"lanes": 2, "cache.pages": 18, "cache.prefix": prefix}
        runtime = afd_runtime._replace(deployment=layouts.deployment(tiny_model, overrides))
        with layouts.serving(runtime) as engine:
            check(run(engine), wanted)
        assert engine.schedulers[0].num_preemptions


def test_two_groups_on_three_lanes(tiny_model, wanted):
    overrides = {"attention.dp": 2, "attention.tp": 2, "ffn.ep": 2, "lanes": 3}
    with layouts.running(tiny_model, overrides) as engine:
        check(run(engine), wanted)
        assert engine.compilations_after_ready == 0


@pytest.fixture(scope="module")
def engine(colocated_runtime):
    with layouts.serving(colocated_runtime) as engine:
        yield engine


def test_neighbours_draw_the_same_with_and_without_rules_beside_them(engine):
    """Steps with rules draw all slots again, by another program."""
    plain = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=5)
    outputs = []
    for company in ({}, {"frequency_penalty": 1.0}, {"logit_bias": {3: 5.0}, "logprobs": 5}):
        collector = Collector()
        collector.submit(engine, PROMPTS[3], plain, request_id="mine")
        for number in range(3):
            collector.submit(engine, PROMPTS[number], SamplingParams(max_tokens=30, **company))
        outputs.append(collector.wait()["mine"])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0].token_ids) == 30


class TestEmittedElsewhere:
    """A request whose first tokens another engine generated goes on as that one would have."""

    def test_with_every_option(self, engine, wanted):
        collector, rest = Collector(), {}
        for number, (tokens, logs, _) in enumerate(wanted):
            for cut in {1, len(tokens) // 2, len(tokens) - 1} - {0}:
                name = f"{number}, {OPTIONS[number % len(OPTIONS)]}, after {cut}"
                params = params_of(number)
                emitted = tokens[:cut]
                collector.submit(engine, PROMPTS[number], params, request_id=name, emitted=emitted)
                rest[name] = tokens[cut:], logs[cut:], params
        found = collector.wait()
        for name, (tokens, logs, params) in rest.items():
            got = [token for news in collector.outputs(name) for token in news.token_ids]
            assert got == tokens, name
            stops = params.grammar is not None or params.stop_token_ids
            assert found[name].finish_reason == ("stop" if stops else "length"), name
            if params.logprobs is not None:
                reported = [i for news in collector.outputs(name) for i in news.logprobs]
                own = [row[token] for row, token in zip(logs, tokens, strict=True)]
                np.testing.assert_allclose([item.logprob for item in reported], own, atol=2e-4)

    @pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 9, "frequency_penalty": 1.0}])
    def test_drawn_with_a_seed(self, engine, options):
        params = SamplingParams(max_tokens=20, temperature=0.9, seed=2**32 - 9, **options)
        collector = Collector()
        collector.submit(engine, PROMPTS[2], params, request_id="all")
        tokens = collector.wait()["all"].token_ids
        for cut in (1, 8, 19):
            collector.submit(engine, PROMPTS[2], params, request_id=f"{cut}", emitted=tokens[:cut])
            assert collector.wait()[f"{cut}"].token_ids == tokens[cut:]

    def test_more_than_there_may_be(self, engine):
        params = SamplingParams(max_tokens=3)
        with pytest.raises(InvalidRequestError, match="3 tokens were generated already, of 3"):
            engine.submit([1, 2], params, print, emitted=[5, 6, 7])
        with pytest.raises(InvalidRequestError, match=r"emitted\[1\]: token id 9999"):
            engine.submit([1, 2], params, print, emitted=[5, 9999])
        grammar = SamplingParams(max_tokens=9, grammar=Residues())
        with pytest.raises(InvalidRequestError, match="grammar"):
            engine.submit([1, 2], grammar, print, emitted=[5])

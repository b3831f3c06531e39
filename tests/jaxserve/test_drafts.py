"""Drafts change no token: greedy and sampled, with whatever else requests ask for."""

import numpy as np
import pytest
import yaml

from jaxserve.engine.request import SamplingParams
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.layouts import COLOCATED, PROMPTS, Collector

pytestmark = pytest.mark.unoptimised

NGRAM = {"speculative.method": "ngram", "speculative.drafts": 3, "speculative.automatic": False}

SAMPLED = SamplingParams(
    max_tokens=24, temperature=0.7, top_k=20, top_p=0.95, min_p=0.02, seed=5, ignore_eos=True
)
OPTIONS = yaml.safe_load(golden.text("engine/draft_options.yaml"))


def mixed() -> list[SamplingParams]:
    """For every prompt, one of the options, greedy and not."""
    return [
        SamplingParams(
            **{"max_tokens": 16, "temperature": 0.4 * (n % 3), "seed": n, "ignore_eos": True}
            | OPTIONS[n % len(OPTIONS)]
        )
        for n in range(len(PROMPTS))
    ]


def run_mixed(engine) -> list[tuple]:
    collector = Collector()
    for prompt, params in zip(PROMPTS, mixed(), strict=True):
        collector.submit(engine, prompt, params)
    outputs = collector.wait()
    layouts.idle(engine)

    def ranked(name):
        return [one.token_id for news in collector.outputs(name) for one in news.logprobs]

    return [(one.token_ids, one.finish_reason, ranked(name)) for name, one in outputs.items()]


class Counted:
    """Counts the drafts of an engine's steps, and how many of them held."""

    def __init__(self, engine):
        self.drafted = self.held = 0
        self.ruled = 0
        """Numbers of rows whose logits are changed."""
        for scheduler in engine.schedulers:
            scheduler.complete = self._counting(scheduler.complete)

    def _counting(self, complete):
        def counted(plan, result):
            if plan.bucket.drafts:
                samples = plan.sample_counts > 0
                self.drafted += int((plan.sample_counts - 1)[samples].sum())
                ruled = [one.row for one in plan.options if one.rules is not None]
                of_ruled = samples & np.isin(plan.rows, ruled)
                self.ruled += int((result.counts.reshape(-1)[plan.rows] - 1)[of_ruled].sum())
                self.held += int((result.counts.reshape(-1)[plan.rows] - 1)[samples].sum())
            return complete(plan, result)

        return counted


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    with layouts.serving(colocated_runtime) as engine:
        return layouts.generate(engine, params=SAMPLED), run_mixed(engine)


# Two meshes: `test_prediction_layouts.py` and `test_fuzz.py`.
def test_the_same_tokens_as_without(tiny_model, reference, expected):
    sampled, with_options = expected
    with layouts.running(tiny_model, COLOCATED | NGRAM | {"lanes": 2}) as engine:
        counted = Counted(engine)
        assert layouts.generate(engine) == reference.tokens
        # About 100 of 1,110: drafts get the room that prompts leave, so timing moves both.
        assert counted.held > 50
        assert counted.drafted > 500
        assert layouts.generate(engine, params=SAMPLED) == sampled
        assert run_mixed(engine) == with_options
        assert counted.ruled > 0
        layouts.idle(engine)
        assert engine.compilations_after_ready == 0
        drafts = engine.load().drafts
        assert (drafts.drafted, sum(drafts.accepted)) == (counted.drafted, counted.held)

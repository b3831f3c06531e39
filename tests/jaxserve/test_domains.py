"""Several domains in one runtime: the colocated tokens, and who takes part in what.

Over `pull`: `fleet/test_domains.py`.
"""

import pytest

from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised

PROMPTS = layouts.PROMPTS[:10]
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    """The colocated tokens, greedy and seeded."""
    with layouts.serving(colocated_runtime) as engine:
        return [layouts.generate(engine, PROMPTS, params) for params in (GREEDY, SEEDED)]


# `test_fuzz.py` has two domains with two lanes, both exchanges and transports.
def test_domains_give_the_colocated_tokens(tiny_model, expected):
    with layouts.running(tiny_model, {"domains": 3, "lanes": 2}) as engine:
        tokens = [layouts.generate(engine, PROMPTS, params) for params in (GREEDY, SEEDED)]
        assert tokens == expected
        assert engine.compilations_after_ready == 0
        assert len(engine.load().domains) == len(engine.schedulers) == 3
        assert all(scheduler.queue.prompt_tokens > 0 for scheduler in engine.schedulers)
        check_that_an_idle_domain_takes_no_part(engine, expected[0])


def check_that_an_idle_domain_takes_no_part(engine, expected):
    """One request at a time: one lane of one domain has steps, and the others none."""
    before = list(engine._loop.issued)
    for prompt, tokens in zip(PROMPTS[:2], expected, strict=False):
        assert layouts.generate(engine, [prompt], GREEDY) == [tokens]
    issued = [now - then for now, then in zip(engine._loop.issued, before, strict=True)]
    assert sum(count > 0 for count in issued) <= 2, issued

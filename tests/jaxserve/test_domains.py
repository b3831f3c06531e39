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

CASES = {
    "2 domains, 1 lane": {"domains": 2},
    "2 domains, 2 lanes, all-to-all, ppermute": {
        "domains": 2,
        "lanes": 2,
        "attention.tp": 2,
        "ffn.ep": 2,
        "ffn.exchange": "alltoall",
        "link.transport": "ppermute",
    },
    "3 domains, 1 lane, all-to-all": {
        "domains": 3,
        "attention.dp": 2,
        "ffn.ep": 2,
        "ffn.exchange": "alltoall",
    },
    "3 domains, 2 lanes": {"domains": 3, "lanes": 2},
}


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    """The colocated tokens, greedy and seeded."""
    with layouts.serving(colocated_runtime) as engine:
        return [layouts.generate(engine, PROMPTS, params) for params in (GREEDY, SEEDED)]


@pytest.mark.parametrize(
    "case",
    # `test_fuzz.py` has two domains with two lanes, an exchange and `ppermute`.
    [
        pytest.param(case, marks=[pytest.mark.matrix] * (case != "3 domains, 2 lanes"))
        for case in CASES
    ],
)
def test_domains_give_the_colocated_tokens(case, tiny_model, expected):
    with layouts.running(tiny_model, CASES[case]) as engine:
        tokens = [layouts.generate(engine, PROMPTS, params) for params in (GREEDY, SEEDED)]
        assert tokens == expected
        assert engine.compilations_after_ready == 0
        assert len(engine.load().domains) == len(engine.schedulers) == CASES[case]["domains"]
        assert all(scheduler.queue.prompt_tokens > 0 for scheduler in engine.schedulers)
        if case == "3 domains, 2 lanes":
            check_that_an_idle_domain_takes_no_part(engine, expected[0])


def check_that_an_idle_domain_takes_no_part(engine, expected):
    """One request at a time: one lane of one domain has steps, and the others none."""
    before = list(engine._loop.issued)
    for prompt, tokens in zip(PROMPTS[:2], expected, strict=False):
        assert layouts.generate(engine, [prompt], GREEDY) == [tokens]
    issued = [now - then for now, then in zip(engine._loop.issued, before, strict=True)]
    assert sum(count > 0 for count in issued) <= 2, issued

"""A step that fails on the devices, with the pages that it was given: the requests are computed
anew, and their streams are those of an undisturbed run."""

import msgspec
import pytest

from jaxserve.fleet.assembly import make_engine
from tests.jaxserve import layouts
from tests.jaxserve.layouts import PROMPTS, Collector
from tests.jaxserve.losing import Losing

pytestmark, NIGHTLY = pytest.mark.unoptimised, pytest.mark.nightly

PARAMS = [
    layouts.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    layouts.SamplingParams(
        max_tokens=20, temperature=1.0, seed=5, frequency_penalty=0.7, ignore_eos=True
    ),
]


@pytest.fixture(
    params=["colocated_runtime", "afd_runtime", pytest.param("step_runtime", marks=NIGHTLY)]
)
def engine(request):
    made = make_engine(request.getfixturevalue(request.param), eos_token_ids=frozenset())
    made.start()
    yield made
    made.close()


def answers(engine, salt):
    """Prompts share pages; each is answered greedily and drawn."""
    collector = Collector()
    for prompt in (PROMPTS[1], PROMPTS[7], PROMPTS[3]):
        for params in PARAMS:
            own = msgspec.structs.replace(params, cache_salt=salt)
            collector.submit(engine, prompt, own)
    return collector.wait()


@pytest.mark.parametrize("where", ["stage", "result"])
def test_the_tokens_are_those_of_an_undisturbed_run(engine, where, monkeypatch, caplog):
    expected = answers(engine, "calm")
    losing = Losing(engine, monkeypatch)
    losing.lose(where, after=25)
    assert answers(engine, "storm") == expected
    assert losing.times == 0
    assert "a step was lost: " in caplog.text
    assert "INTERNAL: a device lost its step" in caplog.text
    layouts.idle(engine)
    assert answers(engine, "storm") == expected, "nothing of the lost pages is found again"
    assert engine.status == "ready"


def test_one_that_fails_again_and_again_ends_the_engine(engine, monkeypatch):
    Losing(engine, monkeypatch).lose("result", times=10)
    output = layouts.ask(engine, PROMPTS[0], PARAMS[0])
    assert output.finish_reason == "error"
    assert "INTERNAL: a device lost its step" in output.error
    assert engine.status == "failed"
    assert engine.driver.renew(), "for whoever uses it next"

"""A step that fails on the devices, with the pages that it was given: the requests are computed
anew, and their streams are those of an undisturbed run."""

import msgspec
import pytest
from jax.errors import JaxRuntimeError

from jaxserve.engine import stepper
from jaxserve.fleet.assembly import make_engine
from tests.jaxserve import layouts
from tests.jaxserve.layouts import PROMPTS, Collector

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


class Failing:
    """Fails as an observer of a stage would, in mid-step, where it takes the driver's pages along;
    or as the reader of a step's tokens, on a thread of its own. `times` calls fail from the
    `after`th on."""

    def __init__(self, driver, after, times):
        self.driver, self.after, self.times = driver, after, times
        self.read = stepper.step_result

    def fail(self):
        self.after -= 1
        if self.after < 0 < self.times:
            self.times -= 1
            raise JaxRuntimeError("INTERNAL: a device lost its step")

    def observe(self, *stage):
        if self.after < 1 <= self.times:
            for array in self.driver.kv_arrays().load():
                array.delete()
        self.fail()

    def result(self, *step):
        self.fail()
        return self.read(*step)


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
    driver = engine.driver
    expected = answers(engine, "calm")
    failing = Failing(driver, after=25, times=1)
    if where == "stage":
        monkeypatch.setattr(driver, "observer", failing)
    else:
        monkeypatch.setattr(stepper, "step_result", failing.result)
    assert answers(engine, "storm") == expected
    assert failing.times == 0
    assert "a step was lost: " in caplog.text
    assert "INTERNAL: a device lost its step" in caplog.text
    layouts.idle(engine)
    assert answers(engine, "storm") == expected, "nothing of the lost pages is found again"
    assert engine.status == "ready"


def test_one_that_fails_again_and_again_ends_the_engine(engine, monkeypatch):
    monkeypatch.setattr(stepper, "step_result", Failing(engine.driver, 0, 10).result)
    output = layouts.ask(engine, PROMPTS[0], PARAMS[0])
    assert output.finish_reason == "error"
    assert "INTERNAL: a device lost its step" in output.error
    assert engine.status == "failed"
    assert engine.driver.renew(), "for whoever uses it next"

"""Drafts of a prediction module change no token: greedy and sampled, in every layout (`matrix`)."""

import dataclasses
import itertools

import pytest

from jaxserve.errors import ConfigError
from tests.jaxserve import layouts
from tests.jaxserve.fleet.test_domains import open_domain, serving
from tests.jaxserve.layouts import COLOCATED, LAYOUTS
from tests.jaxserve.test_drafts import Counted, run_mixed
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

SIZES = dataclasses.replace(layouts.SIZES, mtp=True)

COLOCATED_ON_3 = COLOCATED | {"attention.dp": 3, "lanes": 2, "pipeline": "step"}
STEP = {"pipeline": "step", "lanes": 3, "attention.dp": 2, "ffn.ep": 2}
ALL = {"colocated": COLOCATED, "colocated on 3": COLOCATED_ON_3, "step": STEP} | LAYOUTS

ALWAYS = {"speculative.automatic": False}

# Modules on several attention devices: `roles/test_prediction.py`, against the NumPy models.
BY_DEFAULT = "1A2F ep"
MORE = {"lanes": 3, "link.transport": "ppermute", "ffn.exchange": "alltoall"}


def cases():
    yield pytest.param(ALL[BY_DEFAULT] | MORE, 3, id=f"{BY_DEFAULT}, 3 drafts")
    for (layout, overrides), drafts in itertools.product(ALL.items(), (1, 2, 3)):
        yield pytest.param(overrides, drafts, id=f"{layout}, {drafts}", marks=pytest.mark.matrix)


@pytest.fixture(scope="module")
def with_module(tmp_path_factory):
    """The model of the layouts, and a module behind it: its tokens are the same."""
    return write_tiny_step3(tmp_path_factory.mktemp("mtp"), SIZES, seed=layouts.SEED)


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    with layouts.serving(colocated_runtime) as engine:
        return run_mixed(engine)


@pytest.mark.parametrize(("overrides", "drafts"), list(cases()))
def test_the_same_tokens_as_without(overrides, drafts, with_module, reference, expected):
    speculative = {"speculative.method": "mtp", "speculative.drafts": drafts} | ALWAYS
    with layouts.running(with_module, overrides | speculative) as engine:
        counted = Counted(engine)
        assert layouts.generate(engine) == reference.tokens
        assert counted.drafted > 300
        assert run_mixed(engine) == expected
        assert counted.held > 0
        assert engine.compilations_after_ready == 0


@pytest.mark.multihost
def test_over_pull(with_module, reference):
    """The ffn worker serves a domain that has the module, and refuses one that has not."""
    overrides = {"lanes": 2, "speculative.method": "mtp", "speculative.drafts": 1} | ALWAYS
    with serving(with_module, overrides) as server:
        domain = open_domain(with_module, server, "one lane", 2, overrides)
        counted = Counted(domain.engine)
        assert layouts.generate(domain.engine) == reference.tokens
        assert counted.drafted > 300
        assert domain.engine.compilations_after_ready == 0
        domain.close()
        with pytest.raises(ConfigError, match=r"contract\.layers"):
            open_domain(with_module, server, "one lane", 2)

"""Drafts of a prediction module change no token: greedy and sampled, in every layout.

`make test` runs a selection that has both modes, `pull` and every number of drafts, the marker
`matrix` all layouts with all numbers of drafts.
"""

import dataclasses

import pytest

from jaxserve.engine.make_engine import make_engine
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.errors import ConfigError
from jaxserve.fleet.attention_runtime import attention_cell
from jaxserve.fleet.ffn_runtime import message_server
from jaxserve.roles.capacity import deployment_buckets
from tests.jaxserve import layouts
from tests.jaxserve.fleet.test_domains import FFN, TOKEN, role_of
from tests.jaxserve.layouts import COLOCATED, LAYOUTS
from tests.jaxserve.test_drafts import Counted, run_mixed
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

SIZES = dataclasses.replace(layouts.SIZES, mtp=True)

COLOCATED_ON_3 = COLOCATED | {"attention.dp": 3, "lanes": 2}
ALL = {"colocated": COLOCATED, "colocated on 3": COLOCATED_ON_3} | LAYOUTS

ALWAYS = {"speculative.automatic": False}

# Modules on several attention devices: `roles/test_prediction.py`, against the NumPy models.
BY_DEFAULT = "1A2F ep"
MORE = {"lanes": 3, "link.transport": "ppermute", "ffn.exchange": "alltoall"}


def cases():
    for layout in ("1A2F ep", "2A4F"):
        marks = [] if layout == BY_DEFAULT else [pytest.mark.matrix]
        yield pytest.param(ALL[layout] | MORE, 3, id=f"{layout}, 3 drafts", marks=marks)
    for layout, overrides in ALL.items():
        for drafts in (1, 2, 3):
            yield pytest.param(
                overrides, drafts, id=f"{layout}, {drafts}", marks=pytest.mark.matrix
            )


@pytest.fixture(scope="module")
def with_module(tmp_path_factory):
    """The model of the layouts, and a module behind it: its tokens are the same."""
    return write_tiny_step3(tmp_path_factory.mktemp("mtp"), SIZES, seed=layouts.SEED)


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    engine = make_engine(colocated_runtime, eos_token_ids=frozenset())
    engine.start()
    made = layouts.generate(engine), run_mixed(engine)
    engine.close()
    return made


@pytest.mark.parametrize(("overrides", "drafts"), list(cases()))
def test_the_same_tokens_as_without(overrides, drafts, with_module, expected):
    greedy, with_options = expected
    speculative = {"speculative.method": "mtp", "speculative.drafts": drafts} | ALWAYS
    with layouts.running(with_module, overrides | speculative) as engine:
        counted = Counted(engine)
        assert layouts.generate(engine) == greedy
        assert counted.drafted > 300
        assert run_mixed(engine) == with_options
        assert counted.held > 0
        layouts.idle(engine)
        assert engine.compilations_after_ready == 0


@pytest.mark.multihost
def test_over_pull(with_module, expected):
    """The ffn worker serves a domain that has the module, and refuses one that has not."""
    overrides = FFN | {"lanes": 2, "speculative.method": "mtp", "speculative.drafts": 1} | ALWAYS
    here = overrides | {"link.addresses": ["127.0.0.1:1"]}
    server, _ = message_server(*role_of(with_module, "ffn", 0, here), TOKEN, "127.0.0.1:0")
    there = {"link.addresses": [server.start()]}
    role, deployment, source = role_of(with_module, "attention", 2, overrides | there)
    cell, link = attention_cell(role, deployment, source, TOKEN)
    warm_up(runtime := Runtime(deployment, role.config, cell, deployment_buckets(deployment)))
    engine = make_engine(runtime, eos_token_ids=frozenset())
    engine.start()
    counted = Counted(engine)
    assert layouts.generate(engine) == expected[0]
    assert counted.drafted > 300
    assert engine.compilations_after_ready == 0
    engine.close()
    link.close()
    without = role_of(with_module, "attention", 2, FFN | there)
    with pytest.raises(ConfigError, match=r"contract\.layers"):
        attention_cell(*without, TOKEN)
    server.close()

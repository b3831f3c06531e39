"""The shared expert on ranks of its own (`ffn.shared: ranks:n`): same tokens in every layout while
routed experts move, and with prediction modules.

`make test` runs one layout; the marker `matrix` has the others.
"""

from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from jaxserve.engine.request import SamplingParams
from tests import golden
from tests.jaxserve import layouts, test_families_layouts
from tests.jaxserve.moving import move_at_random
from tests.reference.catalogue import CATALOGUE
from tests.reference.make_golden import GOLDEN
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

PROMPTS = layouts.PROMPTS[:6]
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
RECONFIGURATIONS = 8

SIZES = TinyStep3(
    vocab_size=161, moe_intermediate_size=33, share_expert_dim=66, moe_num_experts=7, mtp=True
)
"""A shared expert that takes two slots."""

TABLES = yaml.safe_load(golden.text("roles/shared_ranks.yaml"))
MOVING: dict[str, dict[str, Any]] = TABLES["moving"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = TABLES["families"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_step3(tmp_path_factory.mktemp("shared"), SIZES, seed=layouts.SEED)


@pytest.fixture(scope="module")
def expected(model):
    reference = Step3Numpy.from_folder(model)
    return [reference.greedy(prompt, PARAMS.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "layout",
    ["4 + 2, gather", *(pytest.param(name, marks=pytest.mark.matrix) for name in list(MOVING)[1:])],
)
def test_the_same_tokens_while_routed_experts_move(layout, model, expected):
    with layouts.running(model, MOVING[layout]) as engine:
        assert layouts.generate(engine, PROMPTS, PARAMS) == expected
        check_moves(engine, expected)


def check_moves(engine, expected):
    """Moves all there is to random places; the shared expert's ranks take no part in it."""
    move_at_random(engine, PROMPTS, PARAMS, expected, RECONFIGURATIONS)
    balancer = engine.experts
    sizes = balancer.facts.sizes
    proposal = balancer.rebalance(dry_run=True)
    assert 0 < proposal.balance_now <= proposal.balance_then <= 1
    assert {len(ranks) for ranks in balancer.view().loads.values()} == {sizes.ranks}
    assert balancer.view().moves > RECONFIGURATIONS
    assert engine.compilations_after_ready == 0


@pytest.mark.matrix
@pytest.mark.parametrize("case", FAMILIES)
def test_families_give_the_references_tokens(case, tmp_path):
    """The router's scaling factor is not the shared expert's."""
    name, layout = FAMILIES[case]
    CATALOGUE[name].write(tmp_path)
    got = test_families_layouts.tokens(tmp_path, layout)
    assert got == load_file(GOLDEN / f"{name}.safetensors")["tokens"].tolist()

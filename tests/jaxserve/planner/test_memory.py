"""The search keeps free what `serve --check` counts of the file that it writes."""

import math

import msgspec
import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.deployment_file import PlanFile, deployment_text
from jaxserve.planner.layout_keys import sized_keys, usable
from jaxserve.planner.layouts import Layout
from jaxserve.planner.memory import Memory, largest
from jaxserve.planner.search import Searcher
from jaxserve.roles.pipelines import role_bytes
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import H800, layout

HOSTS = {"h800": H800}
AFD = layout("afd", dp=8, tp=2, ep=4, ffn_tp=2, lanes=2)
EP = layout("ep", dp=16)


def written(search: Searcher, one: Layout, batch: int, tmp_path) -> Deployment:
    """Returns the deployment that `serve` reads of a plan."""
    model = search.calculator.model
    folder = CONFIGS / "models" / model.name
    file = PlanFile(tmp_path / "plan.yaml", folder, model.config, HOSTS, search.calculator)
    file.path.write_text(deployment_text(file, search.evaluate(one, batch), 0.05))
    return load_deployment(file.path)


@pytest.mark.parametrize("alltoall", [False, True])
def test_a_plan_takes_what_check_counts(alltoall, tmp_path):
    """Later layouts use what was counted of earlier ones."""
    search = making.searcher("deepseek-v3", context=6000, assumed=Assumptions(alltoall=alltoall))
    apart = layout("afd", dp=32, ep=72, shared_ranks=8, redundant_slots=1, lanes=3)
    drafted = msgspec.structs.replace(EP, dp=32, ep=32, drafts=1)
    for one, batch in ((AFD, 7), (EP, 9), (apart, 9), (drafted, 30), (AFD, 64), (EP, 1)):
        deployment = written(search, one, batch, tmp_path)
        told = {"platform": "gpu", "modules": deployment.modules}
        config = msgspec.structs.replace(search.calculator.model.config, **told)
        assert search.memory.held(one, batch) == list(role_bytes(config, deployment))


def test_what_the_engine_refuses_has_no_room():
    """Three devices do not divide the heads."""
    memory, three = making.searcher("deepseek-v3").memory, msgspec.structs.replace(AFD, tp=3)
    assert (memory.room(three), memory.shortage(three)) == (0, None)
    assert memory.refused.startswith("attention.tp = 3 does not divide")
    with pytest.raises(ConfigError, match=r"attention\.tp = 3 does not divide"):
        memory.held(three, 1)


@pytest.mark.parametrize("jump", [0, 7, 1000])
def test_interpolation_finds_what_bisection_would(jump):
    """Values that grow in proportion, in jumps, and to infinity."""
    values = [3 * n + n // 10 * jump for n in range(301)] + [math.inf] * 50
    for bound in range(0, 3 * 301 + 31 * jump, 5):
        found = largest(values.__getitem__, 0, 350, bound)
        assert values[found] <= bound < values[found + 1]
    assert largest(values.__getitem__, 0, 300, math.inf) == 300


def test_activations_take_room_from_sequences():
    """Colocated experts of many DP groups: a step's rows may all be one device's."""
    calculator = making.calculator("qwen3-30b-a3b", 256)
    memory = Memory(calculator, HOSTS, HOSTS)
    room = memory.room(EP)
    (held,) = memory.held(EP, room)
    kept = held.weights + held.cache
    assert kept < 0.6 * H800.memory
    assert 0.98 * usable(H800, 0.1) < held.total <= usable(H800, 0.1)
    assert memory.fits(EP, room)
    assert not memory.fits(EP, room + 1)


def test_nothing_fits():
    calculator = making.calculator("deepseek-v3")
    memory = Memory(calculator, HOSTS, HOSTS)
    small = msgspec.structs.replace(AFD, ep=1)
    assert memory.room(small) == 0
    role, needed, there = memory.shortage(small)
    assert (role, there) == ("ffn", pytest.approx(0.9 * 85.5e9))
    assert needed > 300e9


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3.2"])
def test_attention_reads_the_rows_that_the_cache_holds(name):
    """Of four KV heads over eight devices each has a whole one; an indexer has keys of its own."""
    search, one = making.searcher(name), layout("afd", dp=1, tp=8, ep=8)
    made, (attention, _) = search.calculator, search.memory.held(one, 7)
    keys = sized_keys(made, one, H800, 7)
    tokens = made.model.layers * keys["cache.pages"] * keys["cache.page_size"]
    assert attention.cache == tokens * made.cache_row(made.model.attention[0], 8)

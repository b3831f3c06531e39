"""The search keeps the bytes free that `serve` counts from the templates of the engine."""

import msgspec
import pytest
from msgspec.structs import replace

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.commands.checking import on_named_hardware
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.memory import Memory, usable
from jaxserve.planner.scenario import Roles, model_of, scenario
from jaxserve.roles.role_bytes import role_bytes
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import H800, layout

HOSTS = {"h800": H800}
AFD = layout("afd", dp=8, tp=2, ep=4, ffn_tp=2, lanes=2)
EP = layout("ep", dp=16)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_plan_takes_what_check_counts(name):
    """Every shipped file, with one domain as plans have: activations and pages to the byte. Weights
    are sums by formula, without norms and without scales."""
    deployment = replace(load_deployment(CONFIGS / f"{name}.yaml"), domains=1)
    config, _ = read_model(deployment)
    parts = role_bytes(on_named_hardware(config, deployment), deployment)
    hardware = load_hardware(deployment.attention.hardware or "cpu")
    roles = Roles(hardware, hardware, ("one", "one"))
    tokens = deployment.cache.pages * deployment.cache.page_size
    model, stored = model_of(deployment, CONFIGS)
    made = scenario(deployment, model, stored, roles, tokens, Assumptions())
    limits, one = deployment.scheduler, {"one": hardware}
    planned = Memory(made.attention, one, one).held(made.layout, limits.slots, limits.token_budget)
    assert made.attention.sequence_bytes(made.layout.tp) == parts[0].cache
    for part, counted in zip(planned, parts, strict=True):
        assert part.activations == counted.activations
        assert part.weights == pytest.approx(counted.weights, rel=0.005)


def test_activations_take_room_from_sequences():
    """Colocated experts of many DP groups: a step's rows may all be one device's."""
    calculator = making.calculator("qwen3-30b-a3b", 256)
    memory = Memory(calculator, HOSTS, HOSTS)
    room = memory.room(EP)
    (held,) = memory.held(EP, room)
    kept = held.weights + held.cache
    assert kept < 0.6 * H800.memory
    assert 0.98 * usable(H800, 0.1) < kept + held.step <= usable(H800, 0.1)
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

"""What the search keeps free is what `serve` counts: against the templates of the engine."""

import msgspec
import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.planner.layouts import Layout
from jaxserve.planner.memory import Memory, token_budget, usable
from jaxserve.planner.models import model_config, model_folder
from jaxserve.roles.role_bytes import role_bytes
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import H800, layout

HOSTS = {"h800": H800}
AFD = layout("afd", dp=8, tp=2, ep=4, ffn_tp=2, lanes=2)
WIDE = msgspec.structs.replace(AFD, dp=16, tp=1, ep=16, ffn_tp=1, lanes=3)
EP = layout("ep", dp=16)


def served(model: str, planned: Layout, batch: int) -> list[tuple[int, int]]:
    """(weights, activations and room for an expert) of each role, as `serve --check` counts."""
    budget = token_budget(batch, 0)
    limits = {"slots": batch, "max_length": 4096, "token_budget": budget}
    tree = {
        "model": "",
        "mode": "afd" if planned.mode == "afd" else "colocated",
        "lanes": planned.lanes,
        "attention": {"dp": planned.dp, "tp": planned.tp, "weights": "fp8"},
        "ffn": {"ep": planned.ep, "tp": planned.ffn_tp, "weights": "fp8"},
        "link": {"dispatch": "fp8"},
        "cache": {"format": "fp8", "page_size": 64, "pages": 64},
        "scheduler": limits | {"token_buckets": [budget], "page_buckets": [64]},
    }
    if planned.mode != "afd":
        tree["ffn"] = {"weights": "fp8"}
    config = msgspec.structs.replace(model_config(model_folder(model)), platform="gpu")
    parts = role_bytes(config, msgspec.convert(tree, Deployment))
    return [(part.weights, part.activations + part.moving) for part in parts]


@pytest.mark.parametrize(
    ("model", "layout", "batch"),
    [("deepseek-v3", WIDE, 48), ("qwen3-30b-a3b", AFD, 200), ("qwen3-30b-a3b", EP, 300)],
)
def test_as_serve_counts(model, layout, batch):
    calculator = making.calculator(model)
    planned = Memory(calculator, HOSTS, HOSTS).held(layout, batch)
    for part, (weights, step) in zip(planned, served(model, layout, batch), strict=True):
        assert part.weights == pytest.approx(weights, rel=0.005)
        assert part.step == pytest.approx(step, rel=0.001)


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

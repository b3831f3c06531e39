"""The order of the stages: literal for one, two and three lanes, and what must hold for all."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.roles.schedule import Rotation, Stage
from tests import golden


def spell(stages) -> str:
    """`A0 D0 C1 F0 …`: attend, dispatch, combine, ffn and leave (L), with the lane in front."""
    letters = {"attend": "A", "dispatch": "D", "ffn": "F", "combine": "C", "leave": "L"}
    return " ".join(f"{'abcd'[stage.lane]}{letters[stage.name]}{stage.layer}" for stage in stages)


def run(rotation: Rotation, turns: int) -> str:
    return " | ".join(spell(stages) for stages in itertools.islice(rotation.turns, turns))


def begun(layers: int, *lanes: int) -> Rotation:
    """A rotation with as many lanes as have begun, all of them in turn."""
    rotation = Rotation(layers, len(lanes))
    for lane in lanes:
        rotation.begin(lane)
    return rotation


@golden.table("roles/turns.yaml")
def test_lanes_that_begin_together(lanes, turns):
    rotation = begun(2, *range(lanes))
    assert run(rotation, turns.count("|") + 1) == turns
    assert rotation.active == []
    rotation.begin(0)
    assert run(rotation, 1) == "aA0 aD0 aF0"


def test_passes_are_further_layers_of_the_step_that_has_them():
    rotation = Rotation(layers=2, lanes=2)
    rotation.begin(0, passes=1)
    rotation.begin(1)
    assert run(rotation, 7) == (
        "aA0 aD0 aF0 | bA0 bD0 aC0 bF0 | aA1 aD1 bC0 aF1 | bA1 bD1 aC1 bF1 | aA2 aD2 bC1 aF2 | "
        "bL2 | aC2 aL3"
    )
    rotation = Rotation(layers=1, lanes=1, gated=True)
    rotation.begin(0, passes=2)
    assert run(rotation, 4) == "aA0 aD0 | aC0 aA1 aD1 | aC1 aA2 aD2 | aC2 aL3"


def test_lanes_are_not_drained():
    """Lane a begins its next step while b is at layer 1; nobody waits for anybody."""
    rotation = begun(2, 0, 1)
    order = [run(rotation, 5)]
    rotation.begin(0)
    order.append(run(rotation, 2))
    rotation.begin(1)
    order.append(run(rotation, 3))
    assert order == [
        "aA0 aD0 aF0 | bA0 bD0 aC0 bF0 | aA1 aD1 bC0 aF1 | bA1 bD1 aC1 bF1 | aL2",
        "aA0 aD0 bC1 aF0 | bL2",
        "bA0 bD0 aC0 bF0 | aA1 aD1 bC0 aF1 | bA1 bD1 aC1 bF1",
    ]


def test_a_lane_that_does_not_begin_anew_is_passed_over():
    rotation = Rotation(layers=1, lanes=3)
    rotation.begin(0)
    rotation.begin(2)
    assert run(rotation, 4) == "aA0 aD0 aF0 | cA0 cD0 aC0 cF0 | aL1 | cC0 cL1"
    rotation.begin(1)
    assert run(rotation, 2) == "bA0 bD0 bF0 | bC0 bL1"


def test_a_lane_cannot_begin_twice():
    rotation = Rotation(layers=3, lanes=2)
    rotation.begin(1)
    next(rotation.turns)
    next(rotation.turns)
    with pytest.raises(ValueError, match="lane 1 is still at layer 2 of its step"):
        rotation.begin(1)


def test_a_turn_of_nobody_is_an_error():
    with pytest.raises(ValueError, match="no lane has begun a step"):
        next(Rotation(layers=3, lanes=2).turns)


class Played:
    """A rotation whose lanes begin when `wishes` says so, one wish a turn."""

    def __init__(self, layers: int, lanes: int, wishes: list[list[int]]):
        rotation = Rotation(layers, lanes)
        self.turns: list[tuple[Stage, ...]] = []
        for wish in wishes:
            for lane in wish:
                if lane < lanes and lane not in rotation.active:
                    rotation.begin(lane)
            if rotation.active:
                self.turns.append(next(rotation.turns))
        while rotation.active:
            self.turns.append(next(rotation.turns))
        self.stages = [stage for turn in self.turns for stage in turn]


plays = given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=40),
)


@plays
def test_every_lane_repeats_attend_dispatch_ffn_combine(layers, lanes, wishes):
    """In this order, layer by layer, from 0 to the leave: no stage is lost, doubled or early."""
    play = Played(layers, lanes, wishes)
    for lane in range(4):
        mine = [(stage.name, stage.layer) for stage in play.stages if stage.lane == lane]
        layer, cycle = 0, ["attend", "dispatch", "ffn", "combine"]
        place = 0
        for name, at in mine:
            if name == "leave":
                assert place == 0
                assert layer == at > 0
                layer = 0
                continue
            assert (name, at) == (cycle[place], layer)
            place = (place + 1) % 4
            layer += place == 0
        assert (place, layer) == (0, 0)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 60))
def test_busy_lanes_get_equal_turns(layers, lanes, turns):
    """All lanes always have work: at no time is one a layer ahead by more than one."""
    rotation, layers_done = Rotation(layers, lanes), Counter()
    for _ in range(turns):
        for lane in set(range(lanes)) - set(rotation.active):
            rotation.begin(lane)
        turn = next(rotation.turns)
        layers_done.update(stage.lane for stage in turn if stage.name == "attend")
        counts = [layers_done[lane] for lane in range(lanes)]
        assert max(counts) - min(counts) <= 1


@plays
def test_at_most_one_result_is_on_hold(layers, lanes, wishes):
    """Between a lane's ffn and its combine stand at most one attend and one dispatch."""
    play = Played(layers, lanes, wishes)
    for index, stage in enumerate(play.stages):
        if stage.name == "ffn":
            combine = play.stages.index(Stage("combine", stage.lane, stage.layer), index)
            between = [s.name for s in play.stages[index + 1 : combine] if s.name != "leave"]
            assert between in ([], ["attend", "dispatch"])

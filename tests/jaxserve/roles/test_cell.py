"""Stages that a cell enqueues, and their order; their results are tested elsewhere."""

from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.observe.probe import Probe
from jaxserve.roles.attention import Cell, Workers
from jaxserve.roles.layout import Bucket, StepLoad
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.worker import CountExperts, Passed
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from tests.jaxserve import layouts
from tests.reference.step3_numpy import Step3Numpy


def plan(runtime, lane, number, tokens=(5, 6), page=0):
    row = SequenceRow(
        slot=1, token_ids=list(tokens), kv_length=len(tokens), page_ids=[page], sample=True
    )
    slots = runtime.deployment.scheduler.slots
    return plan_of_rows(lane, number, runtime.buckets[-1], [[row]], slots=slots)


ORDER = "aff" + "fa" + "aff" + "fa" + "fa"


class Notes:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.stages = []
        self.devices = {}
        self.loads = {}
        self.begun = []

    def observe(self, stage, lane, layer, step, result, load, begun, /):
        self.stages.append((stage, lane, layer, step))
        self.loads[step] = load
        self.begun.append(begun)
        self.devices[stage] = {device.id for device in result.devices()}


@pytest.fixture
def driver(afd_runtime):
    """1A1F with two lanes, both idle, and it is lane 0's turn."""
    driver = afd_runtime.driver
    driver._rotation = Rotation(layers=4, lanes=2)
    yield driver
    driver.observer = None
    while driver.active:
        driver.advance()


class TestCell:
    def test_stages_in_the_order_of_the_schedule(self, afd_runtime, driver):
        """Lane 0 leaves, and begins anew while lane 1 is in its last layer."""
        driver.observer = notes = Notes()
        expected, steps = [], {}
        rotation = Rotation(layers=4, lanes=2)

        def begin(lane, number):
            driver.begin(plan(afd_runtime, lane, number, page=lane))
            rotation.begin(lane)
            steps[lane] = number

        def advance():
            for turn in rotation.turns:
                for name, lane, layer in turn:
                    # The head and the sampler are the attention role's work of one more layer.
                    expected.append(
                        ("attend" if name == "leave" else name, lane, layer, steps[lane])
                    )
                if turn[-1].name == "leave":
                    return driver.advance().plan.number, steps[turn[-1].lane]

        begin(0, 10)
        begin(1, 11)
        finished = [advance()]
        begin(0, 12)
        finished += [advance(), advance()]
        assert finished == [(10, 10), (11, 11), (12, 12)]
        assert notes.stages == expected
        assert not driver.active
        assert notes.devices == {"attend": {0}, "dispatch": {1}, "ffn": {1}, "combine": {0}}
        bucket = afd_runtime.buckets[-1]
        assert notes.loads[10] == StepLoad(bucket.tokens, bucket.pages, 1, 2, 2, 3)
        assert notes.begun == sorted(notes.begun)

    def test_position(self, afd_runtime, driver):
        driver.begin(plan(afd_runtime, 1, 33))
        assert driver.idle_lanes == [0]
        driver.advance()
        assert driver.position() == ("leave", 1, 4, 33)
        assert driver.idle_lanes == [0, 1]


def counted(slots):
    """Tokens so far, [layers, experts]."""
    slots.carry_out(CountExperts(1))
    return sum(part.astype(int) for part in slots.read_counts(1).counts.values())


class Routes(Step3Numpy):
    """The reference, which notes how many tokens each expert of each layer gets."""

    def choose(self, name, x):
        chosen, gates = super().choose(name, x)
        layer = int(name.split("layers.")[1].split(".")[0])
        self.counts[layer] = np.bincount(chosen.ravel(), minlength=layouts.SIZES.moe_num_experts)
        return chosen, gates


@pytest.mark.parametrize("mode", ["afd", "colocated"])
def test_tokens_of_experts_are_those_of_the_reference(mode, tiny_model, request):
    """Counts have the step's tokens, and not its padding."""
    runtime = request.getfixturevalue(f"{mode}_runtime")
    model = Routes.from_folder(tiny_model)
    model.counts = {}
    tokens = (5, 6, 7, 80, 3)
    model.logits(list(tokens))
    probe = Probe(runtime.driver)
    before = counted(runtime.driver.slots)
    probe.turn(True)
    runtime.driver.begin(plan(runtime, 0, 0, tokens))
    runtime.driver.advance()
    probe.turn(False)
    measured = probe.take(20.0)
    probe.close()
    found = counted(runtime.driver.slots) - before
    assert found.tolist() == [own.tolist() for _, own in sorted(model.counts.items())]
    assert found[-1].sum() == len(tokens) * layouts.SIZES.moe_top_k
    stages = ["step"] if mode == "colocated" else ["attend", "combine", "dispatch", "ffn"]
    assert sorted({span.stage for span in measured}) == stages
    assert runtime.driver.observer is None


# attend (sent), dispatch (received), ffn, combine (sent, received), …, leave
@pytest.mark.parametrize(("roles", "expected"), [("a", "aaaaa"), ("f", "fffffff"), ("af", ORDER)])
def test_a_process_runs_the_stages_of_its_roles_in_the_order_of_the_data(roles, expected):
    ran = []

    def begin(role):
        while True:
            ran.append(role)
            yield Passed(jnp.zeros(()))

    workers = [
        tuple(Mock(begin=lambda step, of=of: begin(of)) for of in roles if of == role)
        for role in "af"
    ]
    cell = Cell(Workers(*workers), Rotation(layers=2, lanes=1), lanes=1)
    cell.begin(plan_of_rows(0, 7, Bucket(4, 4), [[]], slots=1))
    cell.advance()
    assert "".join(ran) == expected
    assert cell.position() == ("leave", 0, 2, 7)

from jaxserve.planner import fabric, hardware
from jaxserve.planner.fabric import hops, shape
from jaxserve.planner.hardware import load_hardware
from tests import golden


@golden.table("planner/slices.yaml")
def test_slices(name, devices, chips, far):
    chip = load_hardware(name)
    assert shape(chip, devices) == tuple(chips)
    assert hops(chip, devices) == far


def test_bandwidths():
    """`golden/planner/fabric.txt` says which links bound each of them."""
    golden.check_values("planner/fabric.txt", lambda value: value, vars(hardware) | vars(fabric))

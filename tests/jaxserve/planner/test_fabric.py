import math

from jaxserve.planner.fabric import (
    alltoall_bandwidth,
    gather_bandwidth,
    hops,
    middle_bandwidth,
    shape,
)
from jaxserve.planner.hardware import load_hardware
from tests import golden


@golden.table("planner/slices.yaml")
def test_slices(name, devices, chips, far):
    hardware = load_hardware(name)
    assert shape(hardware, devices) == tuple(chips)
    assert hops(hardware, devices) == far


def test_halves_of_a_slice_share_the_links_between_them():
    v6e = load_hardware("v6e")
    assert middle_bandwidth(v6e, 64) / 32 == 25e9  # 8 links of 100 GB/s for 32 chips
    assert middle_bandwidth(v6e, 256) / 128 == 25e9  # a ring is cut twice
    v7x = load_hardware("v7x")
    assert middle_bandwidth(v7x, 32) == 4 * 100e9  # 2 x 2 links of a chip's, no ring
    assert middle_bandwidth(v7x, 2) == v7x.link  # cores of a chip
    assert middle_bandwidth(load_hardware("h100"), 16) == math.inf


def test_all_to_all_is_bound_by_the_middle_and_gathers_by_the_corner():
    v6e = load_hardware("v6e")
    assert gather_bandwidth(v6e, 64) == 200e9  # a corner has two of four links
    assert alltoall_bandwidth(v6e, 64) == 50e9  # of each device's bytes half cross the middle
    assert gather_bandwidth(v6e, 256) == 400e9
    assert alltoall_bandwidth(v6e, 4) == gather_bandwidth(v6e, 4) == 200e9


def test_a_switch_gives_everybody_its_bandwidth():
    h800 = load_hardware("h800")
    assert gather_bandwidth(h800, 8) == alltoall_bandwidth(h800, 8) == h800.link
    assert hops(h800, 8) == 0

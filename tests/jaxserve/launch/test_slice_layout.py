"""Hops on small slices, counted by hand, and the layouts of shipped TPU files."""

from jaxserve.commands.checking import describe_slice
from jaxserve.config.load import load_deployment
from jaxserve.launch.checked import on_slice
from jaxserve.launch.slice_layout import Hops, Torus, count
from tests import golden

GRID = Torus((2, 4), (False, False))
"""Two hosts of 2 x 2: the first has rows 0 and 1 of four rows of two."""


def test_devices_are_numbered_by_hosts() -> None:
    places = [(device.coords, device.process_index) for device in GRID.devices(2, 1)]
    assert places == [
        *(((0, 0), 0), ((1, 0), 0), ((0, 1), 0), ((1, 1), 0)),
        *(((0, 2), 1), ((1, 2), 1), ((0, 3), 1), ((1, 3), 1)),
    ]
    assert len(GRID.devices(1, 2)) == 16
    # The fifth host of an 8 x 8 slice begins the third row, as libtpu describes it.
    assert Torus((8, 8), (False, False)).devices(16, 1)[16].coords == (0, 2)


def test_a_role_a_host() -> None:
    """Each device sends two rows down; rows 1 and 2 share links. The ffn group is a square."""
    rows = [[(x, y) for y in (0, 1) for x in (0, 1)], [(0, 2), (1, 2), (1, 3), (0, 3)]]
    pairs = [((x, y), (x, y + 2)) for y in (0, 1) for x in (0, 1)]
    assert count(GRID, pairs, [[place] for place in rows[0]], rows[1:]) == Hops(2.0, 2, 0, 1)


def test_both_roles_on_each_host() -> None:
    """Attention has rows 0 and 2, ffn rows 1 and 3: one hop, and no link has two messages. The ffn
    group's two ends are two rows apart."""
    pairs = [((x, y), (x, y + 1)) for y in (0, 2) for x in (0, 1)]
    ffn = [[(0, 1), (1, 1), (1, 3), (0, 3)]]
    assert count(GRID, pairs, [], ffn) == Hops(1.0, 1, 0, 2)


def test_rings_go_the_shorter_way() -> None:
    ring = Torus((2, 4), (False, True))
    assert list(ring.path((0, 0), (0, 3))) == [((0, 0), (0, 3))]
    assert len(list(GRID.path((0, 0), (0, 3)))) == 3
    assert list(GRID.path((1, 2), (0, 1))) == [((1, 2), (0, 2)), ((0, 2), (0, 1))]


def test_the_layout_with_the_fewest_bytes_times_hops() -> None:
    """Blocks are chosen where experts are divided over tp groups, whose rows would go seven hops;
    both roles on each host where only messages cross."""
    found = []
    for name in ("step3-v6e", "step3-v7x", "qwen3-235b-v6e", "deepseek-v3-v7x"):
        made, lines = on_slice(load_deployment(name), "")
        found.append(f"{name}, processes {made.attention.processes}, {made.ffn.processes}")
        found += lines
    said = describe_slice(load_deployment("step3-v6e")).splitlines()
    assert said[1:3] == [line for line in found if line.startswith("v6e 8x8")]
    golden.check("planner/ici.txt", "\n".join(found) + "\n")
    assert Hops(5.25, 4, 3, 1).weighed(100, 10, 1000) == 525 + 30 + 1000

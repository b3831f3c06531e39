import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.mesh import (
    ATTENTION_RULES,
    COLOCATED_FFN_RULES,
    FFN_RULES,
    INSTANCE_RULES,
    AbstractSubmeshes,
    Submeshes,
    axis_product,
    by_process,
    cached_sharding,
    expert_axes,
    partition_spec,
    ring,
    role_groups,
    sharded_zeros,
)
from tests import golden


def deployment(**layout):
    overrides = {key.replace("_", ".", 1): value for key, value in layout.items()}
    return load_deployment(Path(__file__).parent, overrides)


def submeshes(devices=None, **layout):
    return Submeshes(deployment(**layout), devices)


def ids(mesh):
    return [[device.id for device in row] for row in mesh.devices]


def test_devices_come_in_the_order_of_their_processes():
    class Device(NamedTuple):
        id: int
        process_index: int

    places = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0), (5, 0), (6, 1), (7, 1)]
    ordered = by_process([Device(*place) for place in places])
    assert [device.id for device in ordered] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_attention_takes_the_first_devices_and_ffn_the_next():
    meshes = submeshes(attention_dp=2, attention_tp=1, ffn_ep=2, ffn_tp=2)
    assert ids(meshes.attention) == [[0], [1]]
    assert ids(meshes.ffn) == [[2, 3], [4, 5]]
    assert meshes.attention.axis_names == ("dp", "tp")
    assert meshes.ffn.axis_names == ("ep", "tp")
    assert expert_axes(meshes.ffn) == ("ep",)
    assert meshes.ffn_rules is FFN_RULES


def test_instances_are_an_axis_of_their_own():
    """The meshes have the same devices in the same order; arrays by device rows are divided."""
    layout = {"attention_dp": 4, "ffn_ep": 2, "ffn_tp": 2, "ffn_instances": 2}
    meshes = submeshes(**layout)
    assert meshes.ffn.shape == {"instance": 2, "ep": 1, "tp": 2}
    assert [device.id for device in meshes.ffn.devices.flat] == [4, 5, 6, 7]
    assert expert_axes(meshes.ffn) == ("instance", "ep")
    assert meshes.ffn_rules is INSTANCE_RULES
    specs = [partition_spec((one, None), INSTANCE_RULES) for one in ("own_d_ff", "shared_d_ff")]
    assert specs == [PartitionSpec("instance", None), PartitionSpec(("instance", "tp"), None)]
    assert AbstractSubmeshes(deployment(**layout)).ffn.shape == meshes.ffn.shape


def test_colocated_has_one_mesh():
    meshes = submeshes(mode="colocated", attention_dp=2, attention_tp=2, ffn_ep=8)
    assert ids(meshes.attention) == [[0, 1], [2, 3]]
    assert meshes.ffn is meshes.attention
    assert meshes.ffn_rules is COLOCATED_FFN_RULES


@pytest.mark.parametrize("mode", ["afd", "colocated"])
def test_abstract_ones_have_the_same_axes_and_need_no_devices(mode):
    layout = {"mode": mode, "attention_dp": 2, "attention_tp": 2, "ffn_ep": 2, "ffn_tp": 2}
    real, abstract = submeshes(**layout), AbstractSubmeshes(deployment(**layout))
    assert abstract.attention.shape == real.attention.shape
    assert abstract.ffn.shape == real.ffn.shape
    assert abstract.ffn.axis_names == real.ffn.axis_names
    assert abstract.ffn_rules is real.ffn_rules
    thousand = AbstractSubmeshes(deployment(attention_dp=250, attention_tp=4))
    assert axis_product(thousand.attention, ("dp", "tp")) == 1000


def test_too_few_devices_with_the_arithmetic():
    golden.check_arguments("roles/too_few_devices.txt", ConfigError, submeshes, globals())
    meshes = submeshes(jax.devices()[4:6])
    assert (ids(meshes.attention), ids(meshes.ffn)) == ([[4]], [[5]])


@pytest.mark.parametrize(
    ("dimensions", "rules", "axes"),
    [
        (("d_model", "q_heads"), ATTENTION_RULES, (None, "tp")),
        (("expert_slots", "d_model", "expert_d_ff"), FFN_RULES, ("ep", None, "tp")),
        (("d_model", "d_ff"), FFN_RULES, (None, ("ep", "tp"))),
        (("d_ff", None), COLOCATED_FFN_RULES, (("dp", "tp"), None)),
    ],
)
def test_rules(dimensions, rules, axes):
    assert partition_spec(dimensions, rules) == PartitionSpec(*axes)


def test_an_axis_cannot_be_used_twice():
    message = "dimensions ('expert_slots', 'd_ff') use a mesh axis twice: ['ep', 'ep', 'tp']"
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_spec(("expert_slots", "d_ff"), FFN_RULES)


def test_axis_product():
    mesh = submeshes(attention_dp=3, attention_tp=2).attention
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5]], "tp is the minor axis"
    assert [axis_product(mesh, axes) for axes in ("dp", "tp", ("dp", "tp"), None)] == [3, 2, 6, 1]
    assert cached_sharding(mesh, PartitionSpec("dp")) is cached_sharding(mesh, PartitionSpec("dp"))


def test_zeros_lie_where_they_belong_and_give_back_their_own_memory_alone(monkeypatch):
    """In 4 bits that is half a byte an element: more would be the memory of other arrays."""
    given: list[int] = []
    system = SimpleNamespace(madvise=lambda start, size, how: given.append(size.value))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: system)
    mesh = Mesh(np.asarray(jax.devices()[2:4]).reshape(2, 1), ("dp", "tp"))
    array = sharded_zeros((4, 99999), jnp.dtype("int4"), cached_sharding(mesh, PartitionSpec("dp")))
    places = [(shard.device.id, shard.data.shape) for shard in array.addressable_shards]
    assert places == [(2, (2, 99999)), (3, (2, 99999))]
    assert not np.asarray(array, np.float32).any()
    assert [0 < size < 100_000 for size in given] == [True, True]


class Chip(NamedTuple):
    """A core of a chip of a stand-in for a slice."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    device_kind: str = "TPU v6 lite"
    platform: str = "tpu"


def slice_chips(x, y, slice_index=0, first_process=0):
    """A slice of hosts of 2x2 chips, numbered along x, as libtpu numbers them."""
    chips = []
    for row in range(0, y, 2):
        for column in range(0, x, 2):
            host = first_process + (row // 2) * (x // 2) + column // 2
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                place = (column + dx, row + dy, 0)
                number = 1000 * slice_index + place[1] * x + place[0]
                chips.append(Chip(number, host, place, slice_index=slice_index))
    return chips


def hops(group):
    """From each device to the next, and from the last to the first, as links go."""
    places = [device.coords for device in group]
    return [
        sum(abs(a - b) for a, b in zip(one, other, strict=True))
        for one, other in zip(places, [*places[1:], places[0]], strict=True)
    ]


def test_a_group_is_a_ring_of_neighbours():
    chips = slice_chips(8, 8)
    three_by_two = [chip for chip in chips if chip.coords[0] < 3 and chip.coords[1] < 2]
    for group in (three_by_two, *(chips[:count] for count in (2, 4, 8, 16, 32))):
        ordered = ring(group)
        assert sorted(ordered) == sorted(group)
        assert hops(ordered) == [1] * len(group)


def test_what_has_no_ring_stays_in_line():
    line = [chip for chip in slice_chips(8, 2) if chip.coords[1] == 0]
    assert hops(ring(line)) == [1] * 7 + [7]
    odd = [Chip(3 * y + x, 0, (x, y, 0)) for y in range(3) for x in range(3)]
    assert hops(ring(odd)) == [1] * 8 + [4]
    bent = slice_chips(4, 4)[:3]
    assert ring(bent) == bent
    assert ring(["no", "coordinates"]) == ["no", "coordinates"]


def test_cores_of_a_chip_stay_together():
    cores = [
        Chip(2 * n + core, 0, place, core)
        for n, place in enumerate([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)])
        for core in range(2)
    ]
    assert hops(ring(cores)) == [0, 1] * 4


def cut(devices, **layout):
    (attention,), ffn = role_groups(deployment(**layout), by_process(devices))
    return attention, ffn


def test_roles_are_halves_of_a_slice():
    """Step-3 on a v6e-64: attention on 8 x 4 chips, each FFN group on two hosts side by side."""
    attention, ffn = cut(slice_chips(8, 8), attention_dp=32, ffn_ep=4, ffn_tp=8)
    assert {chip.coords[1] for (chip,) in attention} == {0, 1, 2, 3}
    assert {chip.coords[1] for group in ffn for chip in group} == {4, 5, 6, 7}
    assert [hops(group) for group in ffn] == [[1] * 8] * 4


def test_roles_have_whole_slices():
    slices = [slice_chips(4, 4, 1, 4), slice_chips(4, 4, 0, 0)]
    chips = [chip for pair in zip(*slices, strict=True) for chip in pair]
    attention, ffn = cut(chips, attention_dp=8, attention_tp=2, ffn_ep=2, ffn_tp=8)
    assert {chip.slice_index for group in attention for chip in group} == {0}
    assert {chip.slice_index for group in ffn for chip in group} == {1}
    with pytest.raises(ConfigError, match=r"ffn\.tp = 16: group 0 would lie on the slices 0, 1"):
        cut(chips, attention_dp=8, ffn_ep=1, ffn_tp=16)


def test_nodes_of_gpus_are_not_slices():
    """JAX numbers fabrics of GPUs by the same attribute."""

    class Gpu(NamedTuple):
        id: int
        process_index: int
        slice_index: int
        device_kind: str = "NVIDIA H100 80GB HBM3"

    gpus = [Gpu(n, n, n // 8) for n in range(16)]
    _, (group,) = cut(gpus, attention_tp=8, ffn_tp=8)
    assert [gpu.id for gpu in group] == list(range(8, 16))
    (group,), _ = cut(gpus, mode="colocated", attention_tp=16)
    assert [gpu.id for gpu in group] == list(range(16))


@pytest.mark.tpu_aot
@golden.table("config/slices.yaml")
def test_real_slices_are_cut_along_their_links(name, layout):
    """The topologies that libtpu describes."""
    pytest.importorskip("libtpu")
    from jaxserve.planner.aot import topology

    meshes = submeshes(topology(name), **layout)
    for mesh in (meshes.attention, meshes.ffn):
        for group in mesh.devices:
            assert max(hops(group)) <= 1
        corners = np.array([device.coords for device in mesh.devices.flat])
        box = np.prod(corners.max(0) - corners.min(0) + 1)
        cores = 2 if name.startswith("v7x") else 1
        assert box * cores == mesh.size, "a role is one block"


def test_each_host_has_its_part_of_both_roles():
    """Two hosts of four: two devices of each are attention's."""
    hosts = [Chip(n, n // 4, (n % 4, n // 4, 0)) for n in range(8)]
    asked = {"attention_processes": 2, "ffn_processes": 2}
    attention, ffn = cut(hosts, attention_dp=4, ffn_ep=4, **asked)
    assert [[chip.id for chip in row] for row in attention] == [[0], [1], [4], [5]]
    assert [[chip.id for chip in row] for row in ffn] == [[2], [3], [6], [7]]
    attention, ffn = cut(hosts, attention_dp=4, ffn_ep=4)
    assert [chip.id for (chip,) in attention] == [0, 1, 2, 3]

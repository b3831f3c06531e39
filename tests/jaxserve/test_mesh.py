import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config.deployment import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.mesh import (
    ATTENTION_RULES,
    COLOCATED_FFN_RULES,
    FFN_RULES,
    AbstractSubmeshes,
    Submeshes,
    axis_product,
    by_process,
    cached_sharding,
    has_local_devices,
    partition_spec,
    sharded_zeros,
)


def submeshes(devices=None, **layout):
    overrides = {key.replace("_", "."): value for key, value in layout.items()}
    return Submeshes(load_deployment(Path(__file__).parent, overrides), devices)


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
    assert meshes.ffn.axis_names == meshes.ffn_axes == ("ep", "tp")
    assert meshes.ffn_rules is FFN_RULES


def test_tp_is_the_minor_axis():
    assert ids(submeshes(attention_dp=3, attention_tp=2).attention) == [[0, 1], [2, 3], [4, 5]]


def test_colocated_has_one_mesh():
    meshes = submeshes(mode="colocated", attention_dp=2, attention_tp=2, ffn_ep=8)
    assert ids(meshes.attention) == [[0, 1], [2, 3]]
    assert meshes.ffn is meshes.attention
    assert meshes.ffn_axes == ("dp", "tp")
    assert meshes.ffn_rules is COLOCATED_FFN_RULES


@pytest.mark.parametrize("mode", ["afd", "colocated"])
def test_abstract_ones_have_the_same_axes_and_need_no_devices(mode):
    layout = {"mode": mode, "attention_dp": 2, "attention_tp": 2, "ffn_ep": 2, "ffn_tp": 2}
    overrides = {key.replace("_", "."): value for key, value in layout.items()}
    real, folder = submeshes(**layout), Path(__file__).parent
    abstract = AbstractSubmeshes(load_deployment(folder, overrides))
    assert abstract.attention.shape == real.attention.shape
    assert abstract.ffn.shape == real.ffn.shape
    assert abstract.ffn_axes == real.ffn_axes
    assert abstract.ffn_rules is real.ffn_rules
    thousand = load_deployment(folder, {"attention.dp": 250, "attention.tp": 4})
    assert axis_product(AbstractSubmeshes(thousand).attention, ("dp", "tp")) == 1000


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"attention_dp": 3, "attention_tp": 2, "ffn_ep": 2, "ffn_tp": 2},
            "layout attention.dp 3 x attention.tp 2 + ffn.ep 2 x ffn.tp 2 = 10 devices, but there "
            "are 8",
        ),
        (
            {"mode": "colocated", "attention_dp": 9},
            "layout attention.dp 9 x attention.tp 1 = 9 devices, but there are 8",
        ),
    ],
)
def test_too_few_devices_with_the_arithmetic(layout, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        submeshes(**layout)


def test_given_devices():
    devices = jax.devices()[4:6]
    meshes = submeshes(devices)
    assert ids(meshes.attention) + ids(meshes.ffn) == [[[4]][0], [[5]][0]]
    with pytest.raises(ConfigError, match="= 3 devices, but there are 2"):
        submeshes(devices, ffn_ep=2)


def test_rules():
    assert partition_spec(("d_model", "q_heads"), ATTENTION_RULES) == PartitionSpec(None, "tp")
    assert partition_spec(("slots", "d_model", "expert_d_ff"), FFN_RULES) == PartitionSpec(
        "ep", None, "tp"
    )
    assert partition_spec(("d_model", "d_ff"), FFN_RULES) == PartitionSpec(None, ("ep", "tp"))
    assert partition_spec(("d_ff", None), COLOCATED_FFN_RULES) == PartitionSpec(("dp", "tp"), None)


def test_an_axis_cannot_be_used_twice():
    message = "dimensions ('slots', 'd_ff') use a mesh axis twice: ['ep', 'ep', 'tp']"
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_spec(("slots", "d_ff"), FFN_RULES)


def test_axis_product():
    mesh = submeshes(attention_dp=3, attention_tp=2).attention
    assert [axis_product(mesh, axes) for axes in ("dp", "tp", ("dp", "tp"), None)] == [3, 2, 6, 1]


def test_shardings_are_the_same_objects_every_time():
    mesh = submeshes().attention
    assert cached_sharding(mesh, PartitionSpec("dp")) is cached_sharding(mesh, PartitionSpec("dp"))


def test_local_devices():
    assert has_local_devices(submeshes().ffn)


def test_zeros_are_made_where_they_belong():
    mesh = Mesh(np.asarray(jax.devices()[2:4]).reshape(2, 1), ("dp", "tp"))
    array = sharded_zeros(
        (4, 2, 1), jnp.dtype(jnp.bfloat16), NamedSharding(mesh, PartitionSpec("dp"))
    )
    assert array.dtype == jnp.bfloat16
    assert [shard.device.id for shard in array.addressable_shards] == [2, 3]
    assert [shard.data.shape for shard in array.addressable_shards] == [(2, 2, 1), (2, 2, 1)]
    assert not np.asarray(array, np.float32).any()

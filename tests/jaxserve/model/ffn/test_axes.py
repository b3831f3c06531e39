"""Rows of instances, on simulated devices, against places written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.model.ffn.axes import Axes, in_part, own_part
from jaxserve.model.ffn.collectives import gathered

MESH = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("ep", "tp"))
AXES = Axes("ep", "tp", ("ep", "tp"), instances=2)


def on_devices(body, *arguments):
    """What four devices make of their parts of the arguments, one after the other."""
    spec = PartitionSpec(("ep", "tp"))
    mapped = jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(*arguments)).tolist()


def test_every_instance_counts_rows_alike():
    """Two rows a device: that of its own ingress, and that of the same device of the other."""
    positions = [0, 2, 1, 3, 2, 0, 3, 1]
    assert on_devices(lambda x: AXES.position(AXES.device(), 2), jnp.zeros(4)) == positions
    # All that the two devices of an instance have gathered.
    everything = [0, 2, 1, 3, 0, 2, 1, 3, 2, 0, 3, 1, 2, 0, 3, 1]
    found = on_devices(lambda x: AXES.position(jnp.arange(AXES.peers), 2).reshape(-1), jnp.zeros(4))
    assert found == everything


def test_an_instance_gathers_its_own_rows():
    rows = jnp.arange(4.0)[:, None]
    found = on_devices(lambda rows: gathered(rows, AXES.rows, 2), rows)
    assert [row[0] for row in found] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_what_one_instance_does_alone():
    """For the first half of a device's rows; there is nothing for the others."""
    rows = jnp.arange(8.0)[:, None]
    assert [row[0] for row in on_devices(lambda rows: own_part(rows, AXES), rows)] == [0, 2, 4, 6]
    found = on_devices(lambda rows: in_part(own_part(rows, AXES) + 1, AXES), rows)
    assert [row[0] for row in found] == [1, 0, 3, 0, 5, 0, 7, 0]


@pytest.mark.parametrize(("instances", "ranks"), [(1, 4), (2, 2), (4, 1)])
def test_sizes(instances, ranks):
    axes = AXES._replace(instances=instances)
    found = on_devices(lambda x: x + axes.peers + 10 * axes.ranks, jnp.zeros(4, jnp.int32))
    assert found == [11 * ranks] * 4

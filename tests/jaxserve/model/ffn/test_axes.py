"""Rows of instances, on simulated devices, against places written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import axis_index
from jax.sharding import Mesh, PartitionSpec

from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.collectives import gathered

AXES = Axes("ep", "tp", ("ep", "tp"), "instance")
BESIDE = AXES._replace(before=1)


def on_devices(body, *arguments, instances=2):
    """Results of four devices for their parts of the arguments, one after the other."""
    devices = np.array(jax.devices()[:4]).reshape(instances, -1, 1)
    mesh = Mesh(devices, ("instance", "ep", "tp"))
    spec = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(*arguments)).tolist()


def test_every_instance_counts_rows_alike():
    """Two rows a device, its own ingress' first; beside the other role in the order of devices."""
    for axes, places in (AXES, [0, 2, 1, 3, 2, 0, 3, 1]), (BESIDE, [0, 1, 2, 3] * 2):
        of = axes.position
        assert on_devices(lambda x, of=of: of(axis_index(AXES.rows), 2), jnp.zeros(4)) == places
    # All that the two devices of an instance have gathered.
    everything = [0, 2, 1, 3, 0, 2, 1, 3, 2, 0, 3, 1, 2, 0, 3, 1]
    found = on_devices(lambda x: AXES.position(jnp.arange(AXES.peers), 2).reshape(-1), jnp.zeros(4))
    assert found == everything


def test_an_instance_gathers_its_own_rows():
    rows = jnp.arange(4.0)[:, None]
    found = on_devices(lambda rows: gathered(rows, AXES.rows), rows)
    assert [row[0] for row in found] == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(("instances", "ranks"), [(1, 4), (2, 2), (4, 1)])
def test_sizes(instances, ranks):
    zeros = jnp.zeros(4, jnp.int32)
    beside = on_devices(lambda x: x + BESIDE.rank(), zeros, instances=instances)
    assert beside == [place - ranks for place in range(4)]
    for axes in (AXES, AXES._replace(instance=None))[: 2 if instances == 1 else 1]:

        def sizes(x, axes=axes):
            return x + axes.peers + 10 * axes.ranks + 100 * axes.instances

        assert on_devices(sizes, zeros, instances=instances) == [11 * ranks + 100 * instances] * 4
        found = on_devices(lambda x, axes=axes: x + axes.rank(), zeros, instances=instances)
        assert found == [0, 1, 2, 3]

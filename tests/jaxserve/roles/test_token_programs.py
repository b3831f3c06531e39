"""Every device gets the row of its DP group, by either call."""

from types import SimpleNamespace
from unittest.mock import NonCallableMagicMock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.link.dispatch.put import public_put
from jaxserve.roles import token_programs
from jaxserve.roles.token_programs import GroupPut, TokenPrograms
from tests import golden


@pytest.fixture(params=["private", "public"])
def put(request, monkeypatch):
    """Four groups of two devices; the mesh has the devices in another order than the process."""
    if request.param == "public":
        monkeypatch.setattr(token_programs, "fast_put", lambda: public_put)
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("dp", "tp"))
    scheduler = SimpleNamespace(page_buckets=[16])
    deployment = SimpleNamespace(scheduler=scheduler, lanes=2, modules=0)
    programs = NonCallableMagicMock(TokenPrograms)
    programs.configure_mock(mesh=mesh, groups=4, slots=3, tables=1, deployment=deployment)
    return GroupPut(programs)


def test_rows(put):
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    arrived = put.rows(array)
    assert arrived.sharding == NamedSharding(arrived.sharding.mesh, PartitionSpec("dp"))
    assert arrived.committed
    np.testing.assert_array_equal(arrived, array)
    found = {shard.device.id: shard.data.tolist() for shard in arrived.addressable_shards}
    first, second, third, last = ([row] for row in array.tolist())
    assert found == {7: first, 6: first, 5: second, 4: second, 3: third, 2: third, 1: last, 0: last}


# With up to four slots that sample the first others fill the four; all are computed otherwise.
@golden.table("roles/sampling_rows.yaml")
def test_of_sampling(platform, samples, expected):
    programs = SimpleNamespace(config=SimpleNamespace(platform=platform))
    rows = jax.numpy.arange(100, 106)
    made = TokenPrograms.of_sampling(programs, jax.numpy.array(samples) > 0, rows.__getitem__)
    np.testing.assert_array_equal(made, expected)

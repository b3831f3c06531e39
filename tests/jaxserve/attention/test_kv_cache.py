from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.attention.kv_cache import PAGES_SPEC, page_arrays, zeros
from jaxserve.checkpoint.step3 import step3_config
from jaxserve.config.deployment import load_deployment
from tests.reference.tiny_step3 import TinyStep3


def test_every_dp_group_has_its_pages():
    overrides = {"attention.dp": 3, "attention.tp": 2, "cache.pages": 100, "cache.page_size": 4}
    deployment = load_deployment(Path(__file__).parent, {**overrides, "scheduler.max_length": 64})
    keys, values = page_arrays(step3_config(TinyStep3().config()), deployment)
    # One head, and two devices that have a copy of it each.
    assert keys.shape == values.shape == (300, 4, 2, 32)
    assert keys.dtype == values.dtype == jnp.bfloat16


def test_zeros_are_made_where_they_belong():
    mesh = Mesh(np.asarray(jax.devices()[2:4]).reshape(2, 1), ("dp", "tp"))
    array = zeros((4, 2, 1), jnp.dtype(jnp.bfloat16), NamedSharding(mesh, PAGES_SPEC))
    assert array.dtype == jnp.bfloat16
    assert [shard.device.id for shard in array.addressable_shards] == [2, 3]
    assert [shard.data.shape for shard in array.addressable_shards] == [(2, 2, 1), (2, 2, 1)]
    assert not np.asarray(array, np.float32).any()

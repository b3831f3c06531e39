import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoint.source import matrix
from jaxserve.model.module import Formats, Template, scale
from jaxserve.model.module import matrix as linear_map
from jaxserve.preflight.leaves import DeviceLeaves


class Block(nnx.Module):
    def __init__(self, rngs, weights):
        formats = Formats(jnp.dtype(jnp.float32), weights)
        self.map = linear_map(rngs, formats, d_ff=64, d_model=256)
        self.norm = scale(rngs, jnp.dtype(jnp.float32), d_model=256)


@pytest.mark.parametrize("weights", ["plain", "int8", "fp8"])
def test_devices_make_shards_of_one_matrix_with_the_scale_of_weights(weights):
    template = Template(lambda rngs: Block(rngs, weights))
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    names = [{"map": matrix(f"layer.{layer}", 64, 256)} for layer in range(2)]

    def made(sources, axis=None):
        cut, whole = PartitionSpec(None, axis), PartitionSpec()
        shardings = [
            NamedSharding(mesh, cut if leaf.name in ("map", "map.values") else whole)
            for leaf in template.leaves
        ]
        leaves = DeviceLeaves().leaves(template, sources, shardings)
        return dict(zip(template.names, map(np.asarray, leaves), strict=True))

    cut, uncut, first = made(names, "x"), made(names), made(names[0])
    assert all(np.array_equal(cut[name], uncut[name]) for name in cut)
    assert all(np.array_equal(cut[name][0], first[name]) for name in cut)
    assert np.all(cut["norm"] == 1)
    values = cut["map" if weights == "plain" else "map.values"]
    assert not np.array_equal(values[0], values[1])
    if values.dtype == np.uint8:
        values = values.view(jnp.float8_e4m3fn)
    product = values.astype(np.float32) * cut.get("map.scales", np.float32(1))
    assert abs(product.std() * 256**0.5 - 1) < 0.05
    assert abs(product.mean()) < 0.002

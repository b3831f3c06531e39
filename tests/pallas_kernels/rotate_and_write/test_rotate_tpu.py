"""The op as TPUs run it, and RoPE by a view of tiles against NumPy's complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotate_and_write import rotate_tpu
from pallas_kernels.target import Target
from tests.pallas_kernels.rotate_and_write.suite import RotateAndWriteSuite


class TestTpu(RotateAndWriteSuite):
    """The suite has one case of whole tiles."""

    target = Target("mosaic_tpu", "TPU7x")


@pytest.mark.parametrize("shape", [(3, 8, 256), (2, 16, 512), (0, 8, 256)])
def test_pairs_turn(shape):
    rng = np.random.default_rng(0)
    tokens, _, width = shape
    x = rng.normal(size=shape).astype(np.float32)
    angle = rng.uniform(0, 2 * np.pi, (tokens, width // 2))
    pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * np.exp(1j * angle)[:, None]
    turn = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    found = np.asarray(rotate_tpu.rotate(jnp.asarray(x), *turn))
    np.testing.assert_allclose(found, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "width", "covered"), [(64, 256, True), (1, 256, False), (8, 128, False)]
)
def test_whole_tiles_alone(heads, width, covered):
    assert rotate_tpu.covers(jnp.zeros((2, heads, width), jnp.bfloat16)) == covered

"""Shapes and targets for tests that only trace."""

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target

H200, V6E = Target("mosaic_gpu", "NVIDIA H200"), Target("mosaic_tpu", "TPU v6 lite")


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

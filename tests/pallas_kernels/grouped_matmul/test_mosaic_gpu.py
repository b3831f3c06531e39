"""The Hopper kernel, interpreted on the CPU with a race detector, and how it is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.target import Target
from tests.pallas_kernels.grouped_matmul.suite import GroupedMatmulSuite

TARGET = Target("mosaic_gpu", "NVIDIA H200", interpret=True)


class TestMosaicGpu(GroupedMatmulSuite):
    """Two output tiles, the second one half empty; rows in several tiles that begin anywhere."""

    target = TARGET
    rows = 46
    d_out = 192
    counts = (0, 1, 17)

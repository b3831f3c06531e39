"""Angles of rotary position embedding, with YaRN for long contexts. Called by the attention
families; what rotates by them is `pallas_kernels/rotate_and_write`."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.config.model import Rope, Yarn
from jaxserve.model.attention.batch import RaggedBatch


def frequencies(rope: Rope, dimensions: int) -> np.ndarray:
    """Angular frequency of each of the dimensions / 2 pairs, in radians per position, FP32."""
    frequency = rope.theta ** (-np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    if rope.yarn is not None:
        # Pairs that turn less than once within the training context are interpolated.
        share = _interpolated(rope.yarn, rope.theta, dimensions)
        frequency = frequency / rope.yarn.factor * share + frequency * (1 - share)
    return frequency.astype(np.float32)


def _interpolated(yarn: Yarn, theta: float, dimensions: int) -> np.ndarray:
    """Interpolation weight of each pair, 0 to 1 (YaRN §3.2): the share of its frequency that is
    divided by the scaling factor."""

    def dimension(turns: float) -> float:
        """The (fractional) pair index that makes this many rotations within the training
        context."""
        position = yarn.original_positions / (turns * 2 * math.pi)
        return dimensions * math.log(position) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(dimensions // 2) - low) / (high - low), 0, 1)


def rotation(
    position: Int[Array, " tokens"], dimensions: int, rope: Rope
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Cosine and sine of each token's angles, FP32, times YaRN's magnitude."""
    angle = position.astype(jnp.float32)[:, None] * frequencies(rope, dimensions)
    magnitude = rope.yarn.magnitude if rope.yarn else 1.0
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def batch_rotation(
    batch: RaggedBatch, dimensions: int, rope: Rope
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """The same of a batch, which may have them."""
    return batch.turn or rotation(batch.position, dimensions, rope)

"""Angles of rotary position embedding, with YaRN or Llama 3's scaling for long contexts. Called by
the attention families; `pallas_kernels/rotate_and_write` rotates by these angles."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.config.model import Rope, Yarn
from jaxserve.model.attention.batch import RaggedBatch


def frequencies(rope: Rope, dimensions: int) -> np.ndarray:
    """Angular frequency of each of the dimensions / 2 pairs, in radians per position, FP32; 0 for
    pairs beyond `rope.columns`, which are not rotated."""
    columns = rope.columns or dimensions
    frequency = rope.theta ** (-np.arange(0, columns, 2, dtype=np.float64) / columns)
    if scaling := rope.yarn or rope.llama3:
        # Pairs that turn seldom within the training context are interpolated.
        if isinstance(scaling, Yarn):
            share = _interpolated(scaling, rope.theta, columns)
        else:
            turns = frequency * scaling.original_positions / (2 * np.pi)
            share = 1 - np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        frequency = frequency / scaling.factor * share + frequency * (1 - share)
    return np.pad(frequency.astype(np.float32), (0, (dimensions - columns) // 2))


def paired(x: Float[Array, "*batch width"], rope: Rope) -> Float[Array, "*batch width"]:
    """Orders the columns of a head so that the pairs (i, i + width/2) are those that `rope`
    rotates, followed by pairs that stay. Queries and keys are ordered alike, so that their products
    do not change."""
    if not rope.columns:
        return x
    middle = (x.shape[-1] + rope.columns) // 2
    low, high, *rest = jnp.split(x, [rope.columns // 2, rope.columns, middle], axis=-1)
    return jnp.concatenate([low, rest[0], high, rest[1]], axis=-1)


def _interpolated(yarn: Yarn, theta: float, dimensions: int) -> np.ndarray:
    """Interpolation weight of each pair, 0 to 1 (YaRN §3.2): the share of its frequency that is
    divided by the scaling factor."""

    def dimension(turns: float) -> float:
        """The (fractional) pair index that rotates this many times in the training context."""
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
    frequency = frequencies(rope, dimensions)
    angle = position.astype(jnp.float32)[:, None] * frequency
    magnitude = np.where(frequency, np.float32(rope.yarn.magnitude if rope.yarn else 1), 1)
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def batch_rotation(
    batch: RaggedBatch, dimensions: int, rope: Rope
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """The same of a batch, which may have them."""
    return batch.own.angles or rotation(batch.position, dimensions, rope)

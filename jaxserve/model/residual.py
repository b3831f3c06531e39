"""The residual between sublayers: one stream, or several with hyper-connections.

A residual is rows [tokens, `ModelConfig.residual_width`]. With several streams
(manifold-constrained hyper-connections, DeepSeek-V4 §2.2) a row has them side by side, and behind
them for each the factor with which a sublayer's output is added to it. `StreamMixer.read` makes the
sublayer's input and mixes the streams at once, before the output is there: with AFD that happens
while the FFN works. Where layers share an indexer (GLM-5.2), the positions that it has chosen lie
behind the one stream, and so reach the next layer however a program passes residuals on; 2,048 of
them take as many bytes as a row of 6,144 columns. Used by `blocks.py` and by the programs that add
answers of the ffn role.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jaxserve.config.model import ModelConfig, Streams
from jaxserve.model.module import scale, weight, zeros
from pallas_kernels.grouped_matmul.dense import matmul


def streams_of(
    config: ModelConfig, x: Float[Array, "tokens d_model"]
) -> Float[Array, "tokens residual"]:
    """Starts a residual from rows of the embedding: all streams are equal."""
    return widened(config, jnp.tile(x, (1, config.streams.count)) if config.streams else x)


def widened(config: ModelConfig, x: Float[Array, "tokens some"]) -> Float[Array, "tokens residual"]:
    """Adds columns of zeros, up to the width of a residual."""
    return jnp.pad(x, ((0, 0), (0, config.residual_width - x.shape[1])))


def added(
    config: ModelConfig, x: Float[Array, "tokens residual"], output: Float[Array, "tokens d_model"]
) -> Float[Array, "tokens residual"]:
    """Adds a sublayer's output to the residual that its `read` returned."""
    if config.streams is None:
        return x + widened(config, output)
    count = config.streams.count
    streams, factors = jnp.split(x, [count * config.d_model], axis=1)
    every = factors[:, :, None] * output[:, None, :]
    streams += every.reshape(streams.shape)
    return jnp.concatenate([streams, factors], axis=1)


class StreamMixer(nnx.Module):
    """Reads a residual of several streams; maps it to the weights that mix its streams. All FP32.

    Args:
      parts: 3, or 1 for the residual's end, where the streams are only joined.

    Attributes:
      map: [rows, count · d_model]: weights of the streams in the input, weights of the output in
        the streams, and the matrix that mixes the streams; rows = count · (2 + count), or count.
      base: [rows], added to these weights.
      gain: factors of the parts.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, parts: int = 3):
        assert config.streams
        self.own, self.epsilon = config.streams, config.norm_epsilon
        fp32, count = jnp.dtype(jnp.float32), self.own.count
        rows = count if parts == 1 else count * (2 + count)
        self.map = weight(rngs, fp32, mixed=rows, streams=count * config.d_model)
        self.base = zeros(rngs, fp32, mixed=rows)
        self.gain = scale(rngs, fp32, gains=parts)

    def join(self, x: Float[Array, "tokens residual"]) -> Float[Array, "tokens d_model"]:
        """Joins the streams to one row."""
        return self._joined(*self._weights(x)[:2]).astype(x.dtype)

    def read(
        self, x: Float[Array, "tokens residual"]
    ) -> tuple[Float[Array, "tokens d_model"], Float[Array, "tokens residual"]]:
        """Returns the sublayer's input, and the mixed residual that `added` takes."""
        streams, into, out_of, mixing = self._weights(x)
        matrix = _doubly_stochastic(mixing.reshape(-1, self.own.count, self.own.count), self.own)
        mixed = jnp.sum(matrix[..., None] * streams[:, :, None], axis=1)  # [tokens, streams, d]
        factors = 2 * jax.nn.sigmoid(out_of)
        rest = jnp.concatenate([mixed.reshape(len(x), -1), factors], axis=1)
        return self._joined(streams, into).astype(x.dtype), rest.astype(x.dtype)

    def _weights(self, x: Array) -> tuple[Array, ...]:
        """Returns the streams [tokens, streams, d_model], and the weights, part by part."""
        count = self.own.count
        flat = x[:, : self.map.shape[1]].astype(jnp.float32)
        variance = jnp.mean(jnp.square(flat), axis=1, keepdims=True)
        mapped = matmul(flat * jax.lax.rsqrt(variance + self.epsilon), self.map[...])
        sizes = count, count, count**2
        gains = [jnp.full(size, gain) for size, gain in zip(sizes, self.gain[...], strict=False)]
        mapped = mapped * jnp.concatenate(gains) + self.base[...]
        weights = jnp.split(mapped, [count, 2 * count], axis=1)
        return flat.reshape(len(x), count, -1), *weights

    def _joined(self, streams: Array, into: Array) -> Array:
        return jnp.sum((jax.nn.sigmoid(into) + self.own.epsilon)[:, :, None] * streams, axis=1)


def _doubly_stochastic(
    weights: Float32[Array, "tokens streams streams_"], own: Streams
) -> Float32[Array, "tokens streams streams_"]:
    """Makes rows and columns of matrices add up to 1, by Sinkhorn-Knopp's algorithm."""
    matrix = jax.nn.softmax(weights, axis=-1) + own.epsilon
    matrix /= jnp.sum(matrix, axis=-2, keepdims=True) + own.epsilon

    def step(_: int, matrix: Array) -> Array:
        matrix /= jnp.sum(matrix, axis=-1, keepdims=True) + own.epsilon
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + own.epsilon)

    return jax.lax.fori_loop(0, own.iterations - 1, step, matrix)

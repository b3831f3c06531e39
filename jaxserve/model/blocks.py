"""The blocks that the attention role runs: its part of each layer, embedding, head, prediction.

The part of a layer that the ffn role runs is `ffn/block.py`. The programs in `roles/` place both on
meshes. A block is a module (`module.py`); inside a program it holds one device's slices of the
weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import ATTENTION_RULES, RoleMeshes, axis_product, shards
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.family import attention_module
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.ffn.router import ExpertRouter
from jaxserve.model.matrix_formats import role_formats
from jaxserve.model.message import DispatchMessage, EncodedRows, norm_and_encode_rows
from jaxserve.model.module import Formats, Template, all_columns, matrix, rms_norm, scale, weight
from jaxserve.model.residual import StreamMixer, added, streams_of, widened
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.lookup import rows_of


class AttentionBlock(nnx.Module):
    """The attention role's part of a layer: norm, attention, residual, norm, router.

    Attributes:
      dispatch: number format of the rows sent to the ffn role.
      input_mixer, post_mixer: read the residual for attention and for the FFN; None: it is one
        stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        formats: Formats,
        dispatch: FormatName,
        rngs: nnx.Rngs,
    ):
        self.config, self.dispatch = config, dispatch
        self.input_norm = scale(rngs, formats.norms, d_model=config.d_model)
        self.attention = attention_module(config, kind, formats, rngs)
        self.spec = config.attentions().index(kind.attention)
        self.post_norm = scale(rngs, formats.norms, d_model=config.d_model)
        rule = kind.ffn.router
        self.router = ExpertRouter(config.d_model, rule, formats.dtype, rngs) if rule else None
        mixers = [StreamMixer(config, rngs) if config.streams else None for _ in range(2)]
        self.input_mixer, self.post_mixer = mixers

    def __call__(
        self, x: Float[Array, "tokens residual"], pages: Pages, batch: RaggedBatch, sentinel: int
    ) -> tuple[Float[Array, "tokens residual"], DispatchMessage, Pages]:
        """Returns the residual that the FFN's output is added to, the message to it, and pages."""
        d, epsilon = self.config.d_model, self.config.norm_epsilon
        with jax.named_scope("attention"):
            row, x = self.input_mixer.read(x) if self.input_mixer else (x[:, :d], x)
            own = batch.of_layer(self.spec)._replace(choice=x[:, d:])
            norm = self.input_norm[...], epsilon
            if getattr(self.attention, "takes_norm", False):
                mixed, pages, *choice = self.attention(row, pages, own, norm)
            else:
                mixed, pages, *choice = self.attention(rms_norm(row, *norm), pages, own)
            mixed = jax.lax.psum(mixed.astype(jnp.float32), "tp").astype(x.dtype)
            x = added(self.config, x, mixed)
            x = x.at[:, d:].set(choice[0]) if choice else x
        with jax.named_scope("router"):
            row, x = self.post_mixer.read(x) if self.post_mixer else (x[:, :d], x)
            normed, encoded = self._norm(row)
            experts = gates = None
            if self.router is not None:
                valid = batch.position >= 0
                experts, gates = self.router(normed, valid, sentinel, batch.token_ids)
            return x, DispatchMessage(normed, experts, gates, encoded), pages

    def _norm(
        self, x: Float[Array, "tokens d_model"]
    ) -> tuple[Float[Array, "tokens d_model"], EncodedRows | None]:
        """Normed rows for the router and, unless each tp device sends its own share of the rows,
        the same rows encoded for the wire."""
        norm, epsilon = self.post_norm[...], self.config.norm_epsilon
        if jax.lax.axis_size("tp") > 1:
            return rms_norm(x, norm, epsilon), None
        return norm_and_encode_rows(x, norm, epsilon, self.dispatch)


class Embedding(nnx.Module):
    """Token embedding [vocab, d_model], columns split over tp; rows come in the activations'
    dtype, as a residual."""

    def __init__(self, config: ModelConfig, formats: Formats, rngs: nnx.Rngs):
        self.dtype, self.config = formats.dtype, config
        floats = formats.floats or formats.dtype
        self.table = weight(rngs, floats, rows=config.vocab, embedding=config.d_model)

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens residual"]:
        rows = all_columns(rows_of(self.table[...], token_ids), self.config.d_model)
        return streams_of(self.config, rows.astype(self.dtype))


class Head(nnx.Module):
    """Final norm and language-model head [vocab, d_model], vocab padded and split over tp."""

    def __init__(self, config: ModelConfig, tensor_ranks: int, formats: Formats, rngs: nnx.Rngs):
        self.config = config
        vocab = -(-config.vocab // tensor_ranks) * tensor_ranks
        self.norm = scale(rngs, formats.norms, d_model=config.d_model)
        formats = dataclasses.replace(formats, weights="plain")
        self.weight = matrix(rngs, formats, vocab=vocab, d_model=config.d_model)
        self.streams = StreamMixer(config, rngs, 1) if config.streams else None

    def __call__(self, x: Float[Array, "rows residual"]) -> Float[Array, "rows vocab"]:
        """Computes FP32 logits."""
        return self.logits(self.normed(x))

    def own_columns(self, x: Float[Array, "rows residual"]) -> Float[Array, "rows columns"]:
        """Computes this device's columns of the FP32 logits; padding has -inf."""
        own = matmul(self.normed(x), self.weight[...])
        if own.shape[1] * jax.lax.axis_size("tp") == self.config.vocab:
            return own
        there = self.config.vocab - jax.lax.axis_index("tp") * own.shape[1]
        return jnp.where(jnp.arange(own.shape[1]) < there, own, -jnp.inf)

    def normed(self, x: Float[Array, "rows residual"]) -> Float[Array, "rows d_model"]:
        """Applies the final norm, whose results logits are made of."""
        row = self.streams.join(x) if self.streams else x[:, : self.config.d_model]
        return rms_norm(row, self.norm[...], self.config.norm_epsilon)

    def logits(self, hidden: Float[Array, "rows d_model"]) -> Float[Array, "rows vocab"]:
        """Computes FP32 logits of hidden states behind the final norm."""
        return all_columns(matmul(hidden, self.weight[...]), self.config.vocab)


class Prediction(nnx.Module):
    """Joins a hidden state and the token after it to one row before the layer. Norms the layer's
    rows behind it, of which its own head, or else the model's, makes logits.

    With several streams (DeepSeek-V4) each stream of the hidden state is joined with the token, and
    the module's head joins and norms the streams, but the model's makes logits of them.
    """

    def __init__(self, config: ModelConfig, tensor_ranks: int, formats: Formats, rngs: nnx.Rngs):
        self.config = config
        d_model = config.d_model
        self.token_norm = scale(rngs, formats.norms, d_model=d_model)
        self.hidden_norm = scale(rngs, formats.norms, d_model=d_model)
        # Of streams, the token's matrix and the hidden state's.
        sizes = {"inputs": 2, "embedding": d_model} if config.streams else {"embedding": d_model}
        joined = d_model if config.streams else 2 * d_model
        self.projection = weight(rngs, formats.dtype, **sizes, d_joined=joined)
        own = config.own_heads
        self.head = Head(config, tensor_ranks, formats, rngs) if own else None
        if self.head and config.streams:
            del self.head.weight
        self.norm = None if own else scale(rngs, formats.norms, d_model=d_model)

    def enter(
        self, hidden: Float[Array, "tokens width"], embedded: Float[Array, "tokens residual"]
    ) -> Float[Array, "tokens residual"]:
        """Computes what the layer takes: h' = projection · [norm(embedding of token i + 1);
        norm(h_i)].

        Args:
          hidden: h_i, from the model or the module before this one, behind its last norm unless
            modules have heads of their own.
          embedded: of the token after each.
        """
        d, epsilon = self.config.d_model, self.config.norm_epsilon
        width = hidden.shape[1] - self.config.choice_width
        streams = hidden[:, : width // d * d].reshape(-1, d)
        token = rms_norm(embedded[:, :d], self.token_norm[...], epsilon)
        rows = rms_norm(streams, self.hidden_norm[...], epsilon)
        if self.config.streams:
            of_token, of_stream = self.projection[...]
            columns = matmul(token, of_token).repeat(width // d, axis=0) + matmul(rows, of_stream)
        else:
            columns = matmul(jnp.concatenate([token, rows], axis=1), self.projection[...])
        joined = all_columns(columns.astype(hidden.dtype), d).reshape(len(hidden), -1)
        return widened(self.config, joined)

    def leave(self, x: Float[Array, "tokens residual"]) -> Float[Array, "tokens width"]:
        """Computes the module's hidden states, from the rows behind its layer."""
        if self.norm is None:
            return x
        rows = rms_norm(x[:, : self.config.d_model], self.norm[...], self.config.norm_epsilon)
        return widened(self.config, rows)

    def logits(self, hidden: Float[Array, "rows width"], head: Head) -> Float[Array, "rows vocab"]:
        """Computes FP32 logits of token i + 2 from the module's hidden states.

        Args:
          head: the model's, which makes them unless the module has its own.
        """
        if self.head is None or self.config.streams:
            rows = self.head.normed(hidden) if self.head else hidden[:, : self.config.d_model]
            return head.logits(rows)
        return self.head(hidden)


class AttentionTemplates:
    """The templates of the attention role's blocks; `attention` has them by the kind of layer."""

    def __init__(self, config: ModelConfig, deployment: Deployment, meshes: RoleMeshes):
        check_attention(config, deployment)
        self.config, self.dtype = config, jnp.dtype(deployment.dtype)
        tensor_ranks = axis_product(meshes.attention, "tp")
        divided = shards(meshes.attention, ATTENTION_RULES)
        formats = role_formats(config, deployment, "attention", divided)
        self.embedding = Template(functools.partial(Embedding, config, formats))
        self.head = Template(functools.partial(Head, config, tensor_ranks, formats))
        self.prediction = Template(functools.partial(Prediction, config, tensor_ranks, formats))
        self.attention = {
            kind: Template(
                functools.partial(AttentionBlock, config, kind, formats, deployment.dispatch_format)
            )
            for kind in config.kinds()
        }


def check_attention(config: ModelConfig, deployment: Deployment) -> None:
    """Checks that the attention role's dimensions divide as the deployment asks.

    Raises:
      ConfigError: a dimension does not divide; names the key and the sizes.
    """
    tp = deployment.attention.tp
    sizes = [one for spec in config.attentions() for one in spec.divided.items()]
    for name, size in (*sizes, ("d_model", config.d_model)):
        if size % tp:
            raise ConfigError(f"attention.tp = {tp} does not divide the model's {name} = {size}")
    for spec in config.attentions():
        if spec.kv_heads % tp and (tp % spec.kv_heads or not spec.copies_heads):
            raise ConfigError(
                f"attention.tp = {tp} does not divide or copy {spec.kv_heads} key and value heads"
            )
    if deployment.scheduler.max_length > config.max_positions:
        raise ConfigError(
            f"scheduler.max_length = {deployment.scheduler.max_length} is beyond the model's "
            f"{config.max_positions} positions"
        )

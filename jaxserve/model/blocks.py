"""The blocks of a decoder, split where the link is: each layer has the part that the attention role
runs and the part that the ffn role runs. The programs in `roles/` place them on meshes.

A block is a module (`module.py`); inside a program it holds one device's slices of the weights.
"""

import dataclasses
import functools
from typing import Literal, cast

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS, FormatName, StoredFormat, scaled, sharing
from jaxserve.config.model import FFN, LayerKind, MatrixPart, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import ATTENTION_RULES, RoleMeshes, axis_product, shards
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.family import attention_module
from jaxserve.model.attention.kv_cache import Pages
from jaxserve.model.columns import all_columns
from jaxserve.model.ffn.dense import DenseFFN
from jaxserve.model.ffn.experts import Experts, slot_sizes
from jaxserve.model.ffn.placement import SlotSizes, first_entries
from jaxserve.model.ffn.router import Router
from jaxserve.model.ffn.traffic import ExchangeKind, exchange_of
from jaxserve.model.float_matrices import float_dtype
from jaxserve.model.message import Message
from jaxserve.model.module import BLOCK, Formats, Part, Template, matrix, rms_norm, scale, weight
from jaxserve.model.quant.rows import EncodedRows, norm_and_encode_rows
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.grouped_matmul.packed_sums import Unsummed
from pallas_kernels.grouped_matmul.tiles import RowFormat


class AttentionBlock(nnx.Module):
    """The attention role's part of a layer: norm, attention, residual, norm, router.

    Attributes:
      dispatch: number format of the rows sent to the ffn role.
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
        self.input_norm = scale(formats.norms, d_model=config.d_model)
        self.attention = attention_module(config, kind, formats, rngs)
        self.spec = config.attentions().index(kind.attention)
        self.post_norm = scale(formats.norms, d_model=config.d_model)
        rule = kind.ffn.router
        self.router = Router(config.d_model, rule, formats.dtype, rngs) if rule else None

    def __call__(
        self, x: Float[Array, "tokens d_model"], pages: Pages, batch: RaggedBatch, sentinel: int
    ) -> tuple[Float[Array, "tokens d_model"], Message, Pages]:
        """Returns the residual stream after attention, the message to the ffn role, and the
        pages."""
        epsilon = self.config.norm_epsilon
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.input_norm[...], epsilon)
            mixed, pages = self.attention(normed, pages, batch.of_layer(self.spec))
            x = x + jax.lax.psum(mixed.astype(jnp.float32), "tp").astype(x.dtype)
        with jax.named_scope("router"):
            normed, encoded = self._norm(x)
            experts = gates = None
            if self.router is not None:
                experts, gates = self.router(normed, batch.position >= 0, sentinel)
            return x, Message(normed, experts, gates, encoded), pages

    def _norm(
        self, x: Float[Array, "tokens d_model"]
    ) -> tuple[Float[Array, "tokens d_model"], EncodedRows | None]:
        """Normed rows for the router and, unless each tp device sends its own share of the rows,
        the same rows encoded for the wire."""
        norm, epsilon = self.post_norm[...], self.config.norm_epsilon
        if jax.lax.axis_size("tp") > 1:
            return rms_norm(x, norm, epsilon), None
        return norm_and_encode_rows(x, norm, epsilon, self.dispatch)


class FFNBlock(nnx.Module):
    """The ffn role's part of a layer: a dense FFN, or routed experts and the shared expert, which
    is one of `experts` where it has ranks of its own.

    Attributes:
      own_rows: whether `dense` computes a device's own rows, instead of a share for all rows.
      whole: whether every device then has the whole shared expert, or its instance's whole part.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: FFN,
        ranks: tuple[int, int],
        exchange: ExchangeKind,
        formats: Formats,
        rngs: nnx.Rngs,
        *,
        redundant: int = 0,
        shared_ranks: int = 0,
        whole_shared: bool = False,
        instances: int = 1,
    ):
        d_model, (expert_ranks, tensor_ranks) = config.d_model, ranks
        moe = spec.router is not None
        self.whole = whole = moe and whole_shared
        of_rank = moe and exchange == "alltoall"
        self.own_rows = whole or of_rank
        shards = tensor_ranks * (instances if self.own_rows else expert_ranks)
        d_ff = -(-spec.d_ff // shards) * shards
        more = {"redundant": redundant, "shared_ranks": shared_ranks}
        self.experts = Experts(config, spec, ranks, formats, rngs, **more) if moe else None
        split: Literal["d_ff", "shared_d_ff", "own_d_ff"]
        split = "own_d_ff" if whole else "shared_d_ff" if of_rank else "d_ff"
        formats = dataclasses.replace(formats, weights=formats.dense or formats.weights)
        here = d_ff > 0 and not (moe and shared_ranks)
        dense = functools.partial(DenseFFN, dimension=split, limit=spec.limit)
        self.dense = dense(d_model, d_ff, formats, rngs) if here else None

    def unsummed(
        self, message: Message, rank: Int[Array, ""], layer: Int[Array, ""] | int = 0
    ) -> tuple[Unsummed, Int[Array, " local"] | None]:
        """Computes this device's share of the layer's output, without its work for its own rows.

        Args:
          message: the rows and routing that the attention role sent, with slots for experts.
          rank: this device's ep coordinate.
          layer: index into stacked expert weights; see `Experts`.

        Returns:
          the share, with the results of a token's experts not yet added up; and the tokens that
          each of this device's slots got, None in a layer without routed experts.
        """
        share, choices = None, None
        if self.dense is not None and not self.own_rows:
            with jax.named_scope("dense"):
                share = self.dense(message.tokens, message.encoded)
        if self.experts is not None:
            assert message.experts is not None
            assert message.gates is not None
            with jax.named_scope("experts"):
                choices = self.experts.choices(
                    message.tokens, message.experts, message.gates, rank, layer, message.wide
                )
        if share is None and choices is None:
            share = jnp.zeros(message.tokens.shape, jnp.float32)
        return Unsummed(share, choices), None if choices is None else choices.order.sizes


class Embedding(nnx.Module):
    """Token embedding [vocab, d_model], columns split over tp; rows come in the activations'
    dtype."""

    def __init__(self, config: ModelConfig, formats: Formats, rngs: nnx.Rngs):
        self.dtype, self.d_model = formats.dtype, config.d_model
        floats = formats.floats or formats.dtype
        self.table = weight(rngs, floats, rows=config.vocab, embedding=config.d_model)

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens d_model"]:
        return all_columns(self.table[...][token_ids], self.d_model).astype(self.dtype)


class Head(nnx.Module):
    """Final norm and language-model head [vocab, d_model], vocab padded and split over tp."""

    def __init__(self, config: ModelConfig, tensor_ranks: int, formats: Formats, rngs: nnx.Rngs):
        self.config = config
        vocab = -(-config.vocab // tensor_ranks) * tensor_ranks
        self.norm = scale(formats.norms, d_model=config.d_model)
        formats = dataclasses.replace(formats, weights="plain")
        self.weight = matrix(rngs, formats, vocab=vocab, d_model=config.d_model)

    def __call__(self, x: Float[Array, "rows d_model"]) -> Float[Array, "rows vocab"]:
        """FP32 logits."""
        return self.logits(self.normed(x))

    def own_columns(self, x: Float[Array, "rows d_model"]) -> Float[Array, "rows columns"]:
        """Computes this device's columns of the FP32 logits; padding has -inf."""
        own = matmul(self.normed(x), self.weight[...])
        if own.shape[1] * jax.lax.axis_size("tp") == self.config.vocab:
            return own
        there = self.config.vocab - jax.lax.axis_index("tp") * own.shape[1]
        return jnp.where(jnp.arange(own.shape[1]) < there, own, -jnp.inf)

    def normed(self, x: Float[Array, "rows d_model"]) -> Float[Array, "rows d_model"]:
        """Applies the final norm, whose results logits are made of."""
        return rms_norm(x, self.norm[...], self.config.norm_epsilon)

    def logits(self, hidden: Float[Array, "rows d_model"]) -> Float[Array, "rows vocab"]:
        """Computes FP32 logits of hidden states behind the final norm."""
        return all_columns(matmul(hidden, self.weight[...]), self.config.vocab)


class Prediction(nnx.Module):
    """Joins a hidden state and the token after it to one row before the layer. Norms the layer's
    rows behind it, of which its own head, or else the model's, makes logits."""

    def __init__(self, config: ModelConfig, tensor_ranks: int, formats: Formats, rngs: nnx.Rngs):
        self.config = config
        d_model = config.d_model
        self.token_norm = scale(formats.norms, d_model=d_model)
        self.hidden_norm = scale(formats.norms, d_model=d_model)
        self.projection = weight(rngs, formats.dtype, embedding=d_model, d_joined=2 * d_model)
        own = config.own_heads
        self.head = Head(config, tensor_ranks, formats, rngs) if own else None
        self.norm = None if own else scale(formats.norms, d_model=d_model)

    def enter(
        self, hidden: Float[Array, "tokens d_model"], embedded: Float[Array, "tokens d_model"]
    ) -> Float[Array, "tokens d_model"]:
        """Computes what the layer takes: h' = projection · [norm(embedding of token i + 1);
        norm(h_i)].

        Args:
          hidden: h_i, from the model or the module before this one, behind its last norm unless
            modules have heads of their own.
          embedded: of the token after each.
        """
        epsilon = self.config.norm_epsilon
        joined = jnp.concatenate(
            [
                rms_norm(embedded, self.token_norm[...], epsilon),
                rms_norm(hidden, self.hidden_norm[...], epsilon),
            ],
            axis=1,
        )
        columns = matmul(joined, self.projection[...]).astype(hidden.dtype)
        return jax.lax.all_gather(columns, "tp", axis=1, tiled=True)

    def leave(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        """Computes the module's hidden states, from the rows behind its layer."""
        if self.norm is None:
            return x
        return rms_norm(x, self.norm[...], self.config.norm_epsilon)

    def logits(
        self, hidden: Float[Array, "rows d_model"], head: Head
    ) -> Float[Array, "rows vocab"]:
        """Computes FP32 logits of token i + 2 from the module's hidden states.

        Args:
          head: the model's, which makes them unless the module has its own.
        """
        return head.logits(hidden) if self.head is None else self.head(hidden)


class ModelTemplates:
    """The templates of every block of a model on a deployment's meshes."""

    def __init__(self, config: ModelConfig, deployment: Deployment, meshes: RoleMeshes):
        check_layout(config, deployment)
        dtype = jnp.dtype(deployment.dtype)
        self.config, self.dtype = config, dtype
        self.ranks = deployment.expert_ranks, shards(meshes.ffn, meshes.ffn_rules)["expert_d_ff"]
        tensor_ranks = axis_product(meshes.attention, "tp")
        attention = Formats(
            dtype,
            weight_format(deployment.attention.weights, config, "attention"),
            shards(meshes.attention, ATTENTION_RULES),
            int4=config.int4,
            input_major=config.platform == "cpu",
            floats=float_dtype(config, deployment, "attention"),
            float32_norms=config.unit_norms,
        )
        ffn = dataclasses.replace(
            attention,
            weights=weight_format(deployment.ffn.weights, config, "experts"),
            shards=shards(meshes.ffn, meshes.ffn_rules),
            expert_rows=expert_rows(deployment, config),
            dense=weight_format(deployment.ffn.weights, config, "dense"),
            floats=float_dtype(config, deployment, "ffn"),
        )
        self.embedding = Template(functools.partial(Embedding, config, attention))
        self.head = Template(functools.partial(Head, config, tensor_ranks, attention))
        self.prediction = Template(functools.partial(Prediction, config, tensor_ranks, attention))
        self.attention = {
            kind: Template(
                functools.partial(
                    AttentionBlock, config, kind, attention, deployment.dispatch_format
                )
            )
            for kind in config.kinds()
        }
        self._ffn, self.exchange = ffn, exchange_of(config, deployment)
        self.slots = deployment_slots(config, deployment)
        self.ffn = {
            kind.ffn: Template(
                functools.partial(
                    FFNBlock,
                    config,
                    kind.ffn,
                    self.ranks,
                    self.exchange,
                    ffn,
                    redundant=self.slots.redundant,
                    shared_ranks=self.slots.shared_ranks,
                    whole_shared=deployment.ffn.whole_shared,
                    instances=deployment.ffn.instances,
                ),
                entries={"slots": first_entries(self.slots)},
                parts=shared_parts(self.slots),
            )
            for kind in config.kinds()
        }

    @property
    def moe(self) -> Template | None:
        """Template of a layer's FFN with routed experts; None: a dense model."""
        return next((block for ffn, block in self.ffn.items() if ffn.router), None)

    def of_experts(self, experts: tuple[int, ...]) -> Template:
        """Template of a MoE block that has nothing but one expert a rank: these; negative: none."""
        moe = self.config.moe
        assert moe.router is not None
        router = msgspec.structs.replace(moe.router, experts=len(experts))
        alone = msgspec.structs.replace(moe, router=router, d_ff=0)
        build = functools.partial(
            FFNBlock, self.config, alone, self.ranks, self.exchange, self._ffn
        )
        return Template(build, entries={"slots": experts})


def deployment_slots(config: ModelConfig, deployment: Deployment) -> SlotSizes:
    """The slots of a layer's experts; in colocated mode DP groups are the ranks."""
    ffn = deployment.ffn
    return slot_sizes(config.moe, deployment.expert_ranks, ffn.redundant_slots, ffn.shared_ranks)


def shared_parts(sizes: SlotSizes) -> dict[str, Part]:
    """Leaves whose last entries are parts of the shared expert, which divide its d_ff."""
    if not sizes.shared_parts:
        return {}
    cut = {"gate": 0, "up": 0, "down": 1}
    return {
        f"experts.{leaf}": Part(f"dense.{leaf}", sizes.shared_parts, axis)
        for leaf, axis in cut.items()
    }


def weight_format(wanted: str, config: ModelConfig, part: MatrixPart) -> StoredFormat:
    """Returns the weight format of a part of a layer; `auto` is the checkpoint's own format.

    A format keeps the blocks of a checkpoint that stores the same numbers in blocks.
    """
    if wanted == "auto":
        return "plain" if part in config.plain_parts else config.stored
    if not scaled(wanted):
        return "plain"
    kept = sharing(config.stored) and FORMATS[config.stored].dtype == FORMATS[wanted].dtype
    return config.stored if kept else wanted


def expert_rows(deployment: Deployment, config: ModelConfig) -> RowFormat | None:
    """The `row_format` of routed experts that `ffn.expert_rows` asks for.

    Raises:
      ConfigError: with weights that are not quantised; `blocks` with weights that are sharded
        within a block, or with INT4 groups that do not divide one.
    """
    if deployment.ffn.expert_rows == "auto":
        return None
    weights = weight_format(deployment.ffn.weights, config, "experts")
    rows = deployment.ffn.expert_rows
    if weights == "plain":
        raise ConfigError(
            f"ffn.expert_rows = {rows} needs weights in 8 or 4 bits, ffn.weights is "
            f"{deployment.ffn.weights}"
        )
    shared = sharing(weights)
    if shared == "group" and rows == "blocks" and BLOCK % config.int4.group:
        raise ConfigError(
            f"ffn.expert_rows = blocks needs INT4 groups that divide {BLOCK} columns, the "
            f"checkpoint's have {config.int4.group}"
        )
    if deployment.ffn.expert_rows == "float":
        return "float"
    afd = deployment.topology.has("ffn")
    field, tp = ("ffn.tp", deployment.ffn.tp) if afd else ("attention.tp", deployment.attention.tp)
    d_ff = -(-config.moe.expert_d_ff // tp)
    if shared == "block" and tp > 1 and d_ff % BLOCK:
        raise ConfigError(
            f"ffn.expert_rows = blocks needs whole blocks of {BLOCK} on every device; {field} = "
            f"{tp} leaves {d_ff} of the experts' {config.moe.expert_d_ff} columns"
        )
    return cast(RowFormat, FORMATS[weights].products)


def check_layout(config: ModelConfig, deployment: Deployment) -> None:
    """Checks that every sharded dimension divides as the deployment asks.

    Raises:
      ConfigError: a dimension does not divide; names the key and the sizes.
    """
    tp = deployment.attention.tp
    sizes = [("query heads", spec.q_heads) for spec in config.attentions()]
    for name, size in (*sizes, ("d_model", config.d_model)):
        if size % tp:
            raise ConfigError(f"attention.tp = {tp} does not divide the model's {name} = {size}")
    kv_heads = config.attentions()[0].kv_heads
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"attention.tp = {tp} is neither a divisor nor a multiple of the model's key and value "
            f"heads = {kv_heads}"
        )
    if deployment.scheduler.max_length > config.max_positions:
        raise ConfigError(
            f"scheduler.max_length = {deployment.scheduler.max_length} is beyond the model's "
            f"{config.max_positions} positions"
        )
    afd = deployment.topology.has("ffn")
    field, ep = ("ffn.ep", deployment.ffn.ep) if afd else ("attention.dp", deployment.attention.dp)
    if deployment.ffn.redundant_slots and not config.experts:
        raise ConfigError(
            f"ffn.redundant_slots = {deployment.ffn.redundant_slots}, but the model has no routed "
            "experts"
        )
    if deployment.ffn.shared_ranks:
        _check_shared_ranks(config, deployment)
    if deployment.ffn.whole_shared and not (config.experts and config.moe.d_ff):
        raise ConfigError("ffn.whole_shared = true, but the model has no shared expert")
    if deployment.ffn.exchange != "alltoall":
        return
    if not config.experts:
        raise ConfigError("ffn.exchange = alltoall, but the model has no routed experts")
    if ep == 1:
        raise ConfigError(f"ffn.exchange = alltoall needs 2 or more ranks of experts, {field} = 1")


def _check_shared_ranks(config: ModelConfig, deployment: Deployment) -> None:
    """Raises ConfigError unless the shared expert fits into slots of its own ranks."""
    said = f"ffn.shared_ranks = {deployment.ffn.shared_ranks}"
    if not config.experts or not config.moe.d_ff:
        raise ConfigError(f"{said}, but the model has no shared expert beside routed ones")
    if config.moe.d_ff % config.moe.expert_d_ff:
        raise ConfigError(
            f"{said}: slots are as wide as a routed expert, d_ff = {config.moe.expert_d_ff}, which "
            f"does not divide the shared expert's {config.moe.d_ff}"
        )
    if any(kind.ffn.limit != kind.ffn.expert_limit for kind in config.decoder if kind.ffn.router):
        raise ConfigError(f"{said}: limits of the shared expert and of routed ones differ")
    sizes = deployment_slots(config, deployment)
    if sizes.shared_parts > sizes.local:
        raise ConfigError(
            f"{said}: the shared expert takes {config.moe.d_ff} / {config.moe.expert_d_ff} = "
            f"{sizes.shared_parts} slots, and {config.experts} experts on {sizes.ranks} ranks give "
            f"each {sizes.local}; ffn.redundant_slots = "
            f"{sizes.redundant + sizes.shared_parts - sizes.local} would do"
        )

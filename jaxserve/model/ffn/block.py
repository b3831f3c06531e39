"""The ffn role's part of a layer: its block, the templates of all kinds of it, and their checks.

The programs in `roles/` place them on meshes.
"""

import dataclasses
import functools
from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jaxtyping import Array, Int

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS, sharing
from jaxserve.config.model import FFN, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import RoleMeshes, shards
from jaxserve.model.ffn.dense import DenseFFN
from jaxserve.model.ffn.experts import RoutedExperts, slot_sizes
from jaxserve.model.ffn.placement import SlotSizes, first_entries
from jaxserve.model.ffn.traffic import ExchangeKind, exchange_of
from jaxserve.model.matrix_formats import role_formats, weight_format
from jaxserve.model.message import DispatchMessage
from jaxserve.model.module import BLOCK, AppendedPart, Formats, Template
from pallas_kernels.grouped_matmul.packed_sums import Unsummed
from pallas_kernels.grouped_matmul.tiles import RowFormat


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
        self.experts = RoutedExperts(config, spec, ranks, formats, rngs, **more) if moe else None
        split: Literal["d_ff", "shared_d_ff", "own_d_ff"]
        split = "own_d_ff" if whole else "shared_d_ff" if of_rank else "d_ff"
        formats = dataclasses.replace(formats, weights=formats.dense or formats.weights)
        here = d_ff > 0 and not (moe and shared_ranks)
        dense = functools.partial(DenseFFN, dimension=split, activation=spec.activation)
        self.dense = dense(d_model, d_ff, formats, rngs, gated=spec.gated) if here else None

    def unsummed(
        self, message: DispatchMessage, rank: Int[Array, ""], layer: Int[Array, ""] | int = 0
    ) -> tuple[Unsummed, Int[Array, " local"] | None]:
        """Computes this device's share of the layer's output, without its work for its own rows.

        Args:
          message: the rows and routing that the attention role sent, with slots for experts.
          rank: this device's ep coordinate.
          layer: index into stacked expert weights; see `RoutedExperts`.

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


class FFNTemplates:
    """The templates of the ffn role's blocks, by the spec of their FFN.

    Attributes:
      ranks: ranks that the experts are divided over, and devices that share an expert's d_ff.
      first_expert: number, in messages, of the model's first expert (`fleet/ffn_shard.py`).
    """

    first_expert = 0

    def __init__(self, config: ModelConfig, deployment: Deployment, meshes: RoleMeshes):
        check_ffn(config, deployment)
        self.config, self.dtype = config, jnp.dtype(deployment.dtype)
        divided = shards(meshes.ffn, meshes.ffn_rules)
        self.ranks = deployment.expert_ranks, divided["expert_d_ff"]
        self.exchange = exchange_of(config, deployment)
        self.slots = deployment_slots(config, deployment)
        self._formats = dataclasses.replace(
            role_formats(config, deployment, "ffn", divided),
            expert_rows=expert_rows(deployment, config),
            dense=weight_format(deployment.ffn.weights, config, "dense"),
        )
        self.ffn = {
            kind.ffn: Template(
                functools.partial(
                    FFNBlock,
                    config,
                    kind.ffn,
                    self.ranks,
                    self.exchange,
                    self._formats,
                    redundant=self.slots.redundant,
                    shared_ranks=self.slots.shared_ranks,
                    whole_shared=deployment.ffn.shared == "whole",
                    instances=deployment.ffn.instances,
                ),
                entries={"expert_slots": first_entries(self.slots)},
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
            FFNBlock, self.config, alone, self.ranks, self.exchange, self._formats
        )
        return Template(build, entries={"expert_slots": experts})


def deployment_slots(config: ModelConfig, deployment: Deployment) -> SlotSizes:
    """The slots of a layer's experts; in colocated mode DP groups are the ranks."""
    ffn = deployment.ffn
    return slot_sizes(config.moe, deployment.expert_ranks, ffn.redundant_slots, ffn.shared_ranks)


def shared_parts(sizes: SlotSizes) -> dict[str, AppendedPart]:
    """Leaves whose last entries are parts of the shared expert, which divide its d_ff."""
    if not sizes.shared_parts:
        return {}
    cut = {"gate": 0, "up": 0, "down": 1}
    return {
        f"experts.{leaf}": AppendedPart(f"dense.{leaf}", sizes.shared_parts, axis)
        for leaf, axis in cut.items()
    }


def expert_rows(deployment: Deployment, config: ModelConfig) -> RowFormat | None:
    """The `row_format` of routed experts that `ffn.expert_rows` asks for.

    Raises:
      ConfigError: with weights that are not quantised; `blocks` with weights that are sharded
        within a block, with INT4 groups that do not divide one, or with MXFP4.
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
    shared, products = sharing(weights), FORMATS[weights].products
    if rows == "blocks" and products not in get_args(RowFormat):
        raise ConfigError(f"ffn.expert_rows = blocks: {weights} weights multiply floats alone")
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
    return cast(RowFormat, products)


def check_ffn(config: ModelConfig, deployment: Deployment) -> None:
    """Checks that the model has what the keys of the ffn role ask for.

    Raises:
      ConfigError: names the key and the sizes.
    """
    afd = deployment.topology.has("ffn")
    field, ep = ("ffn.ep", deployment.ffn.ep) if afd else ("attention.dp", deployment.attention.dp)
    if deployment.ffn.redundant_slots and not config.experts:
        raise ConfigError(
            f"ffn.redundant_slots = {deployment.ffn.redundant_slots}, but the model has no routed "
            "experts"
        )
    if deployment.ffn.shared_ranks:
        _check_shared_ranks(config, deployment)
    if deployment.ffn.shared == "whole" and not (config.experts and config.moe.d_ff):
        raise ConfigError("ffn.shared = whole, but the model has no shared expert")
    if deployment.ffn.exchange != "alltoall":
        return
    if not config.experts:
        raise ConfigError("ffn.exchange = alltoall, but the model has no routed experts")
    if ep == 1:
        raise ConfigError(f"ffn.exchange = alltoall needs 2 or more ranks of experts, {field} = 1")


def _check_shared_ranks(config: ModelConfig, deployment: Deployment) -> None:
    """Raises ConfigError unless the shared expert fits into slots of its own ranks."""
    said = f"ffn.shared = {deployment.ffn.shared}"
    if not config.experts or not config.moe.d_ff:
        raise ConfigError(f"{said}, but the model has no shared expert beside routed ones")
    if config.moe.d_ff % config.moe.expert_d_ff:
        raise ConfigError(
            f"{said}: slots are as wide as a routed expert, d_ff = {config.moe.expert_d_ff}, which "
            f"does not divide the shared expert's {config.moe.d_ff}"
        )
    ffns = [kind.ffn for kind in config.decoder if kind.ffn.router]
    if any(ffn.gated or ffn.activation != ffn.expert_activation for ffn in ffns):
        raise ConfigError(f"{said}: limits or gates of the shared expert and of routed ones differ")
    sizes = deployment_slots(config, deployment)
    if sizes.shared_parts > sizes.local:
        raise ConfigError(
            f"{said}: the shared expert takes {config.moe.d_ff} / {config.moe.expert_d_ff} = "
            f"{sizes.shared_parts} slots, and {config.experts} experts on {sizes.ranks} ranks give "
            f"each {sizes.local}; ffn.redundant_slots = "
            f"{sizes.redundant + sizes.shared_parts - sizes.local} would do"
        )

"""A model as a sum of costs: groups of equal attention layers and groups of equal FFN layers.

Made from the engine's `ModelConfig` (`configs/models/<name>/config.json`), or read from
`configs/models/<name>/cost.yaml` for models that the engine cannot run. Called by `cost.py`,
`tables.py` and `search.py`; it knows nothing of hardware and of number formats, except that a group
may fix the format of its cache. `tests/jaxserve/planner/test_models.py` holds the bytes that follow
from these sums to those of the engine's templates (`roles/capacity.py`).
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxserve.checkpoint.families import FAMILIES, architecture
from jaxserve.config.model import MFA, MLA, LayerKind, ModelConfig
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.planner.hardware import read_struct, unknown

Count = Annotated[int, Meta(ge=1)]
Width = Annotated[int, Meta(ge=0)]
Kind = Literal["mfa", "gqa", "mla", "lightning"]


class AttentionLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal attention layers.

    `mla`: `head_dim` is the width of the cached row, which serves as key and value at once.
    `lightning`: linear attention with a state of head_dim × head_dim a head (MiniMax M1).
    """

    layers: Count
    kind: Kind
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    window: Width = 0
    """Attention window in tokens; 0: unlimited."""
    cache_bytes: float = 0.0
    """Bytes of a cached number, where the model fixes it; 0: as the deployment has it."""
    q_latent: Width = 0
    """Width of the low-rank query; 0: none."""
    qk_dim: Width = 0
    """`mla`: of a head's query, nope and rope together."""
    kv_latent: Width = 0
    """`mla`: width of the latent."""
    nope_dim: Width = 0
    v_dim: Width = 0
    int8_products: bool = False
    """Whether they multiply in INT8 (`attention.int8_products`)."""

    def cached_numbers(self, context: int) -> int:
        """Numbers of keys and values, or of states, that one token reads in one layer."""
        if self.kind == "lightning":
            return self.q_heads * self.head_dim**2
        tokens = min(context, self.window) if self.window else context
        arrays = 1 if self.kind == "mla" else 2
        return arrays * self.kv_heads * self.head_dim * tokens

    def split_parameters(self, d_model: int) -> tuple[int, int]:
        """Parameters of the linear maps of one layer: (cut by query heads under tensor
        parallelism, on every device)."""
        heads = self.q_heads * self.head_dim
        if self.kind == "gqa":
            return d_model * (2 * heads + 2 * self.kv_heads * self.head_dim), 0
        if self.kind == "mfa":
            split = (self.q_latent + d_model) * heads
            return split, d_model * (self.q_latent + 2 * self.kv_heads * self.head_dim)
        if self.kind == "lightning":  # q, k, v, gate and output
            return 5 * d_model * heads, 0
        up = self.q_heads * self.qk_dim
        values = self.kv_latent * self.q_heads * (self.nope_dim + self.v_dim)
        out = self.q_heads * self.v_dim * d_model
        query = self.q_latent * up if self.q_latent else d_model * up
        return query + values + out, d_model * (self.q_latent + self.head_dim)


class FFNLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal FFN layers: routed experts, and what every token meets (a dense FFN, or the shared
    experts together)."""

    layers: Count
    experts: Width = 0
    top_k: Width = 0
    expert_d_ff: Width = 0
    shared_d_ff: Width = 0

    @property
    def sparsity(self) -> float:
        """Share of the experts that a token meets; a shared expert counts as one (Step-3 §5.4)."""
        if not self.experts:
            return 1.0
        shared = 1 if self.shared_d_ff else 0
        return (self.top_k + shared) / (self.experts + shared)


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder, as far as its costs go."""

    d_model: Count
    vocab: Count
    attention: list[AttentionLayers]
    ffn: list[FFNLayers]
    mtp_layers: Width = 0
    """Multi-token-prediction modules in the checkpoint; they are none of the layers above."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(group.layers for group in self.ffn)

    @property
    def linear_parameters(self) -> int:
        """Parameters of all linear maps before and after attention."""
        return sum(
            group.layers * sum(group.split_parameters(self.d_model)) for group in self.attention
        )

    @property
    def ffn_activated(self) -> int:
        """FFN parameters that a token meets, without the router."""
        return sum(
            group.layers * 3 * self.d_model * (group.top_k * group.expert_d_ff + group.shared_d_ff)
            for group in self.ffn
        )

    @property
    def ffn_parameters(self) -> int:
        """All FFN parameters, without the router."""
        return sum(
            group.layers
            * 3
            * self.d_model
            * (group.experts * group.expert_d_ff + group.shared_d_ff)
            for group in self.ffn
        )

    @property
    def activated(self) -> int:
        """Parameters that a token meets: linear maps, FFN and head."""
        return self.linear_parameters + self.ffn_activated + self.vocab * self.d_model

    @property
    def parameters(self) -> int:
        """Number of all parameters, with embedding and head, without norms and routers."""
        return self.linear_parameters + self.ffn_parameters + 2 * self.vocab * self.d_model

    @property
    def moe(self) -> FFNLayers | None:
        """The group of most MoE layers; None: a dense model."""
        groups = [group for group in self.ffn if group.experts]
        return max(groups, key=lambda group: group.layers, default=None)

    @property
    def module(self) -> tuple[AttentionLayers, FFNLayers]:
        """A multi-token-prediction module as one more layer: full attention, and experts where the
        model has them (DeepSeek-V3 §2.2)."""
        attention = next((group for group in self.attention if not group.window), self.attention[0])
        ffn = self.moe or self.ffn[0]
        return (
            msgspec.structs.replace(attention, layers=1, int8_products=False),
            msgspec.structs.replace(ffn, layers=1),
        )

    def with_module(self) -> "CostModel":
        """The model with a module as a layer like the others, for weights and cache."""
        attention, ffn = self.module
        return msgspec.structs.replace(
            self, attention=[*self.attention, attention], ffn=[*self.ffn, ffn]
        )


def cost_model(config: ModelConfig) -> CostModel:
    """Describes the costs of a model that the engine runs."""
    attention, ffn = (
        Counter(kinds) for kinds in zip(*map(layer_costs, config.decoder), strict=True)
    )
    return CostModel(
        d_model=config.d_model,
        vocab=config.vocab,
        attention=[
            msgspec.structs.replace(group, layers=attention[group])
            for group in sorted(attention, key=lambda one: (one.window, one.int8_products))
        ],
        ffn=[
            msgspec.structs.replace(group, layers=ffn[group])
            for group in sorted(ffn, key=lambda one: one.experts)
        ],
        mtp_layers=len(config.predictors),
    )


def layer_costs(kind: LayerKind) -> tuple[AttentionLayers, FFNLayers]:
    """The costs of one layer. Layers of several kinds may have equal ones."""
    ffn, router = kind.ffn, kind.ffn.router
    own = FFNLayers(layers=1, shared_d_ff=ffn.d_ff)
    if router:
        own = FFNLayers(
            layers=1,
            experts=router.experts,
            top_k=router.top_k,
            expert_d_ff=ffn.expert_d_ff,
            shared_d_ff=ffn.d_ff,
        )
    return _attention_layer(kind), own


def _attention_layer(kind: LayerKind) -> AttentionLayers:
    sizes = kind.attention
    if isinstance(sizes, MLA):
        return AttentionLayers(
            layers=1,
            kind="mla",
            q_heads=sizes.q_heads,
            kv_heads=1,
            head_dim=sizes.kv_latent + sizes.rope_dim,
            window=sizes.window,
            q_latent=sizes.q_latent,
            qk_dim=sizes.nope_dim + sizes.rope_dim,
            kv_latent=sizes.kv_latent,
            nope_dim=sizes.nope_dim,
            v_dim=sizes.v_dim,
            int8_products=kind.int8_products,
        )
    return AttentionLayers(
        layers=1,
        kind="mfa" if isinstance(sizes, MFA) else "gqa",
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        window=sizes.window,
        q_latent=sizes.latent if isinstance(sizes, MFA) else 0,
        int8_products=kind.int8_products,
    )


def known_models(folder: Path = CONFIGS) -> list[str]:
    """Names of the models under `configs/models`."""
    files = ("config.json", "cost.yaml")
    found = {path.parent.name for file in files for path in (folder / "models").glob(f"*/{file}")}
    return sorted(found)


def model_folder(name: str, folder: Path = CONFIGS) -> Path:
    """Path of the description of a known model, or of the model folder at this path.

    Raises:
      ConfigError: the model is unknown; lists the known models.
    """
    for path in (folder / "models" / name, Path(name)):
        if any((path / file).is_file() for file in ("config.json", "cost.yaml")):
            return path
    raise ConfigError(unknown("model", name, known_models(folder)))


def model_config(path: Path) -> ModelConfig | None:
    """Reads the architecture that the engine would run from this folder; None: it cannot.

    Raises:
      ConfigError: config.json is wrong.
    """
    file = path / "config.json"
    if not file.is_file():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.get("model_type") not in FAMILIES:
            raise ConfigError(
                f"{file}: model_type {tree.get('model_type')!r} is not one of {', '.join(FAMILIES)}"
            )
        return architecture(tree)
    except (OSError, ValueError, AttributeError, CheckpointError) as error:
        raise ConfigError(f"{file}: {error}") from None


def load_model(name: str, folder: Path = CONFIGS, int8: Collection[int] = ()) -> CostModel:
    """A known model by name, or the model folder of this path.

    Args:
      int8: layers whose attention multiplies in INT8; for models that the engine runs.

    Raises:
      ConfigError: the model is unknown (lists the known models), or its description is wrong.
    """
    path = model_folder(name, folder)
    config = model_config(path)
    if config is not None:
        return cost_model(config.with_int8_products(int8))
    model = read_struct(path / "cost.yaml", CostModel)
    counts = [sum(group.layers for group in groups) for groups in (model.attention, model.ffn)]
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{path / 'cost.yaml'}: {counts[0]} attention layers and {counts[1]} FFN layers"
        )
    return model

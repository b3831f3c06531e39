"""A model as a sum of costs: groups of equal attention layers and groups of equal FFN layers.

`cost_model` groups the layers of a `ModelConfig`, which is read from `configs/models/<name>`: by a
family's reader from the model's own `config.json`; or, where the engine knows no such family and
the model can only be planned, as it is written in `model.yaml`. Whatever a kind of attention
decides (widths, FLOPs, cached bytes, parameters) is asked of `AttentionLayers`. Nothing here knows
hardware.
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from jaxserve.checkpoint.families import FAMILIES, architecture
from jaxserve.config.formats import scaled
from jaxserve.config.model import (
    GQA,
    MFA,
    MLA,
    Attention,
    Compressed,
    DeltaNet,
    Indexer,
    LayerKind,
    ModelConfig,
)
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.planner.assumptions import SCALE, Formats, number_bytes
from jaxserve.planner.hardware import read_struct, unknown

STATE_BYTES = 4.0
"""Bytes of a number of a state, which is FP32 whatever the cache's format."""


class AttentionLayers(NamedTuple):
    """Equal attention layers."""

    layers: int
    spec: Attention
    int8_products: bool = False
    """Whether attention multiplies in INT8 (`attention.int8_products`)."""

    @property
    def has_state(self) -> bool:
        """Whether a sequence has one state, in FP32, instead of an entry for each token."""
        return isinstance(self.spec, DeltaNet)

    @property
    def state_numbers(self) -> int:
        """Numbers of a sequence's state; 0 where it has an entry for each token."""
        if isinstance(self.spec, DeltaNet):
            return self.spec.q_heads * self.spec.head_dim * self.spec.value_dim
        return 0

    @property
    def latent(self) -> MLA | None:
        """Parameters of latent attention; None: the group has another kind."""
        return self.spec if isinstance(self.spec, MLA) else None

    @property
    def indexer(self) -> Indexer | None:
        """Chooses the tokens that attention reads; None: it reads all that a token sees."""
        return self.spec.indexer if isinstance(self.spec, MLA | Compressed) else None

    @property
    def scorer(self) -> Indexer | None:
        """The indexer, unless layers of the group share that of a layer before them."""
        return self.indexer if self.indexer and not self.indexer.shared else None

    @property
    def one_row(self) -> bool:
        """Whether a cached row serves as key and value at once."""
        return isinstance(self.spec, MLA | Compressed)

    @property
    def key_dim(self) -> int:
        """Width of a cached key. The row of latent attention serves as key and value at once."""
        latent = self.latent
        return latent.kv_latent + latent.rope_dim if latent else self.spec.head_dim  # type: ignore[union-attr]

    def seen(self, context: int) -> int:
        """Cached rows that a token sees: those of its window's tokens, and compressed ones; a state
        counts as one."""
        if self.has_state:
            return 1
        if isinstance(self.spec, Compressed):
            return min(context, self.spec.window) + self.scored(context)
        return min(context, self.spec.window) if self.spec.window else context

    def scored(self, context: int) -> int:
        """Cached rows among which an indexer chooses, or compressed rows without an indexer."""
        if isinstance(self.spec, Compressed):
            return context // self.spec.every if self.spec.every else 0
        return self.seen(context)

    @property
    def rows_a_token(self) -> float:
        """Cached rows that a token adds to a long sequence: none to a state or to windows alone
        where others are compressed."""
        if isinstance(self.spec, Compressed):
            return 1 / self.spec.every if self.spec.every else 0.0
        return 0.0 if self.has_state else 1.0

    def row_bytes(self, formats: Formats, tp: int) -> float:
        """Bytes of a cached token that attention reads on a device, an indexer's key left out, or
        bytes of the whole state."""
        size, spec = number_bytes(formats.cache), self.spec
        if self.has_state:
            return STATE_BYTES * self.state_numbers / tp
        scale = SCALE if scaled(formats.cache) else 0
        if not isinstance(spec, MLA):
            arrays = 1 if self.one_row else 2
            return arrays * max(1.0, spec.kv_heads / tp) * (spec.head_dim * size + scale)
        rotated = size if formats.rope == "auto" else number_bytes(formats.rope)
        return spec.kv_latent * size + spec.rope_dim * rotated + scale

    def index_row_bytes(self, formats: Formats) -> float:
        """Bytes of an indexer's key of one token; 0 without an indexer of the layer's own."""
        if not self.scorer:
            return 0.0
        scale = SCALE if scaled(formats.cache) else 0
        return self.scorer.head_dim * number_bytes(formats.cache) + scale

    @property
    def core_flops(self) -> float:
        """FLOPs of a query's token with a token that it attends to, all heads: q·k and p·v. Latent
        attention mixes the latent alone, without its positional part."""
        if self.has_state:
            return 7.0 * self.state_numbers
        mixed = self.latent.kv_latent if self.latent else self.key_dim
        return 2.0 * self.spec.q_heads * (self.key_dim + mixed)

    @property
    def index_flops(self) -> float:
        """FLOPs of an indexer's score of one token for another (DeepSeek-V3.2, equation 1)."""
        return 2.0 * self.scorer.heads * self.scorer.head_dim if self.scorer else 0.0

    @property
    def expanded_width(self) -> int:
        """Numbers of a token's expanded keys and values, all heads, in latent attention
        (DeepSeek-V2 §2.1). A pair takes two FLOPs for each."""
        latent = self.latent
        return latent.q_heads * (latent.nope_dim + latent.rope_dim + latent.v_dim) if latent else 0

    @property
    def head_parameters(self) -> int:
        """Parameters of the maps that expand, or absorb, latent keys and values of all heads."""
        latent = self.latent
        return latent.kv_latent * latent.q_heads * (latent.nope_dim + latent.v_dim) if latent else 0

    def split_parameters(self, d_model: int) -> tuple[int, int]:
        """Parameters of the linear maps of one layer: (cut by query heads under tensor
        parallelism, on every device)."""
        match self.spec:
            case MLA() as spec:
                up = spec.q_heads * (spec.nope_dim + spec.rope_dim)
                query = spec.q_latent * up if spec.q_latent else d_model * up
                out = spec.q_heads * spec.v_dim * d_model
                whole = d_model * (spec.q_latent + self.key_dim)
                if index := self.scorer:
                    whole += index.heads * index.head_dim * spec.q_latent
                    whole += d_model * (index.head_dim + index.heads)
                return query + self.head_parameters + out, whole
            case MFA() as spec:
                split = (spec.latent + d_model) * spec.q_heads * spec.head_dim
                return split, d_model * (spec.latent + 2 * spec.kv_heads * spec.head_dim)
            case Compressed() as spec:
                heads, maps = spec.q_heads * spec.head_dim, 2 * (2 if spec.indexer else 1)
                out = (heads + d_model * spec.out_groups) * spec.out_latent
                whole = d_model * (spec.q_latent + spec.head_dim)
                whole += maps * d_model * spec.head_dim if spec.every else 0
                if index := spec.indexer:
                    whole += index.heads * (index.head_dim * spec.q_latent + d_model)
                    whole += maps * d_model * index.head_dim
                return spec.q_latent * heads + out, whole
            case GQA() as spec:
                gates = spec.q_heads * (spec.gate == "columns")
                heads = 2 * (spec.q_heads + spec.kv_heads) + gates
                return d_model * heads * spec.head_dim, 0
            case spec:  # queries, keys; values, gates, output; decays and rates
                keys, values = spec.kv_heads * spec.head_dim, spec.q_heads * spec.value_dim
                return d_model * (2 * keys + 3 * values + 2 * spec.q_heads), 0

    def linear_bytes(self, formats: Formats, d_model: int, tp: int) -> float:
        """Bytes of a layer's linear maps on a device. The engine keeps the per-head maps of latent
        attention in its dtype."""
        split, whole = self.split_parameters(d_model)
        size, rows = formats.weight_bytes, number_bytes(formats.rows)
        return (split / tp + whole) * size + self.head_parameters / tp * (rows - size)


class FFNLayers(NamedTuple):
    """Equal FFN layers: routed experts, and what every token meets (a dense FFN, or the shared
    experts together)."""

    layers: int
    experts: int = 0
    top_k: int = 0
    expert_d_ff: int = 0
    shared_d_ff: int = 0


class CostModel(NamedTuple):
    """A decoder's layers in groups of equal costs."""

    name: str
    """Name of its folder, which measurements name it by."""
    config: ModelConfig
    attention: list[AttentionLayers]
    ffn: list[FFNLayers]
    order: tuple[tuple[int, int], ...]
    """For every layer, the index of its group in `attention` and in `ffn`."""
    modules: tuple[tuple[AttentionLayers, FFNLayers], ...]
    """Layers of the multi-token-prediction modules, which are not among the layers above."""

    @property
    def d_model(self) -> int:
        return self.config.d_model

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def layers(self) -> int:
        return len(self.order)

    @property
    def linear_parameters(self) -> int:
        """Parameters of all linear maps before and after attention."""
        return sum(g.layers * sum(g.split_parameters(self.d_model)) for g in self.attention)

    @property
    def ffn_activated(self) -> int:
        """FFN parameters that a token meets, without the router."""
        widths = (g.layers * (g.top_k * g.expert_d_ff + g.shared_d_ff) for g in self.ffn)
        return 3 * self.d_model * sum(widths)

    @property
    def activated(self) -> int:
        """Parameters that a token meets: linear maps, FFN and head."""
        return self.linear_parameters + self.ffn_activated + self.vocab * self.d_model

    @property
    def moe(self) -> FFNLayers | None:
        """The group of most MoE layers; None: a dense model."""
        groups = [group for group in self.ffn if group.experts]
        return max(groups, key=lambda group: group.layers, default=None)


def cost_model(config: ModelConfig, name: str) -> CostModel:
    """Describes the costs of a model. Kinds of layers with equal costs are one group."""
    layers = [_layer(kind) for kind in config.decoder]
    counts = [Counter(groups) for groups in zip(*layers, strict=True)]
    attention = sorted(counts[0], key=lambda one: (one.spec.window, one.int8_products))
    ffn = sorted(counts[1], key=lambda one: one.experts)
    return CostModel(
        name,
        config,
        [group._replace(layers=counts[0][group]) for group in attention],
        [group._replace(layers=counts[1][group]) for group in ffn],
        tuple((attention.index(a), ffn.index(f)) for a, f in layers),
        tuple(map(_layer, config.predictors)),
    )


def _layer(kind: LayerKind) -> tuple[AttentionLayers, FFNLayers]:
    ffn, router = kind.ffn, kind.ffn.router
    routed = (router.experts, router.top_k, ffn.expert_d_ff) if router else (0, 0, 0)
    return AttentionLayers(1, kind.attention, kind.int8_products), FFNLayers(1, *routed, ffn.d_ff)


FILES = ("config.json", "model.yaml")
"""Descriptions of a model that the engine serves, and of one that can only be planned."""


def known_models(folder: Path = CONFIGS) -> list[str]:
    """Names of the models under `configs/models`."""
    found = {path.parent.name for file in FILES for path in (folder / "models").glob(f"*/{file}")}
    return sorted(found)


def model_folder(name: str, folder: Path = CONFIGS) -> Path:
    """Returns the path of a known model's description, or of the model folder at this path.

    Raises:
      ConfigError: the model is unknown; lists the known models.
    """
    for path in (folder / "models" / name, Path(name)):
        if any((path / file).is_file() for file in FILES):
            return path
    raise ConfigError(unknown("model", name, known_models(folder)))


def model_config(path: Path, *, served: bool = False) -> ModelConfig:
    """Reads the architecture in a model folder.

    Args:
      served: refuses a model that can only be planned.

    Raises:
      ConfigError: the description is wrong, or the engine cannot run the model.
    """
    file, planned = (path / name for name in FILES)
    if not file.is_file():
        if served:
            raise ConfigError(f"the engine cannot run {path.name}, only plan it")
        return read_struct(planned, ModelConfig)
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
    """Returns a known model by name, or the model at this path.

    Args:
      int8: layers whose attention multiplies in INT8.

    Raises:
      ConfigError: the model is unknown (lists the known models), or its description is wrong.
    """
    path = model_folder(name, folder)
    return cost_model(model_config(path).with_int8_products(int8), path.name)

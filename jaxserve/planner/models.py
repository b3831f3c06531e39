"""A model as a sum of costs: groups of equal attention layers and groups of equal FFN layers.

`cost_model` groups the layers of a `ModelConfig`, which is read from `configs/models/<name>`: by a
family's reader from the model's own `config.json`; or, where the engine knows no such family and
the model can only be planned, as it is written in `model.yaml`. Specs know FLOPs; weights, rows and
their bytes are what the engine declares of its modules and caches (`Declared`). Behind it is the
work of kernels beyond its plain count: padding of attention's rows, prompts of latent attention,
rows of the busiest experts, and the blocks in which plain XLA computes without kernels.
"""

import functools
import importlib
import json
import math
import operator
import pkgutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.checkpoint.families import FAMILIES, architecture
from jaxserve.config import attention
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, Attention, Int4, LayerKind, ModelConfig, Platform
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.hardware import read_struct, unknown

PAGE = 1024
"""Tokens of a page, of which any number of tokens that share a cached row is a divisor."""
BESIDE_MAPS = ("scales", "zeros", "bias", "taps")
"""Ends of names of arrays of several dimensions that are no linear maps."""

BLOCK_TOKENS, FIRST_TOKENS = 128, 32
"""Positions of a context that hardware without kernels attends to at a time, and of the first
`BLOCK_TOKENS` (`pallas_kernels/attention/reference.py`)."""
BLOCK_ROWS = 8
"""Rows of one expert that CPUs multiply at a time by weights in 8 or 4 bits; float weights are read
once a group, for one row after the other (`pallas_kernels/grouped_matmul/reference.py`)."""


class AttentionLayers(NamedTuple):
    """Equal attention layers."""

    layers: int
    spec: Attention
    int8_products: bool = False
    """Whether attention multiplies in INT8 (`attention.int8_products`)."""


class Declared(NamedTuple):
    """The sizes that the engine declares for a layer's attention, on one device."""

    parameters: float
    """Parameters of the linear maps that a row passes."""
    weight_bytes: float
    """Bytes of all weights, scales included."""
    row_bytes: float
    """Bytes of a cached row that attention reads, or of the whole state."""
    key_bytes: float
    """Bytes of a row's key that an indexer of the layer's own scores; 0 without one."""
    sent_columns: float = 0.0
    """Columns of a token's heads that go to other DP groups' parts of the output projection."""


def _declared(
    config: ModelConfig, spec: Attention, formats: Formats, tp: int, platform: Platform
) -> Declared:
    """Asks the module that computes attention for its weights, and its cache for the rows. Raises
    ConfigError if the engine cannot keep them in these formats."""
    from jaxserve.mesh import ATTENTION_RULES  # this and the others import JAX
    from jaxserve.model.attention import family, kv_cache
    from jaxserve.model.matrix_formats import role_formats
    from jaxserve.model.module import Template
    from pallas_kernels.quantize import array_bytes

    replace, plain = msgspec.structs.replace, Deployment(model="")
    deployment = replace(
        plain,
        dtype=formats.rows,
        attention=replace(
            plain.attention,
            tp=tp,
            weights=formats.weights,
            output="split" if formats.output > 1 else "whole",
        ),
        cache=replace(plain.cache, format=formats.cache, rope=formats.rope, page_size=PAGE),
    )
    int4 = Int4(formats.group, formats.zero_points)
    config, kind = replace(config, platform=platform, int4=int4), LayerKind(spec, FFN())
    split = [name for name, axis in ATTENTION_RULES.items() if axis == "tp"]
    divided = dict.fromkeys(split, tp) | {"out_heads": tp * formats.output}
    own = role_formats(config, deployment, "attention", divided)
    parameters = weights = sent = 0.0
    module = Template(functools.partial(family.attention_module, config, kind, own))
    for leaf in module.leaves:
        parts = max(divided.get(name or "", 1) for name in leaf.dimensions)
        weights += array_bytes(leaf.shape, leaf.dtype) / parts
        if len(leaf.shape) > 1 and not leaf.name.endswith(BESIDE_MAPS):
            seen = math.prod(leaf.shape) / min(parts, tp)  # every part sees all DP groups' tokens
            parameters += seen
            sent += seen / config.d_model if parts > tp else 0

    def held(reader: kv_cache.Reader) -> float:
        """Bytes of a row of the kind that comes first among those with this reader."""
        entries = kv_cache.layer_entries(config, spec, deployment)
        read = [entry for entry in entries if entry.reader == reader]
        return sum(
            max(1.0, entry.heads / tp) * array_bytes(array.shape, array.dtype)
            for entry in read
            if entry.every == read[0].every
            for array in kv_cache.row_arrays([entry], (entry.every or 1,), formats.cache)
        )

    sent *= 1 - 1 / formats.output
    return Declared(parameters, weights, held("attention"), held("indexer"), sent)


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
    declared: Callable[[Attention, Formats, int, Platform], Declared]
    """Returns what the engine declares for attention: of a spec, in formats, divided over a number
    of `tp` devices, on a platform."""

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
        functools.lru_cache(None)(functools.partial(_declared, config)),
    )


def _layer(kind: LayerKind) -> tuple[AttentionLayers, FFNLayers]:
    ffn, router = kind.ffn, kind.ffn.router
    routed = (router.experts, router.top_k, ffn.expert_d_ff) if router else (0, 0, 0)
    return AttentionLayers(1, kind.attention, kind.int8_products), FFNLayers(1, *routed, ffn.d_ff)


class Expanded(NamedTuple):
    """The part of latent attention that runs on expanded keys and values instead of the latents
    (DeepSeek-V2 §2.1); numbers or arrays, an entry a sequence."""

    pairs: Any
    """Pairs of a query's token with a token that it attends to."""
    tokens: Any
    """Tokens whose keys and values are expanded, written, and read again."""
    again: Any
    """Tokens for which the maps are charged in addition to their pass as linear maps."""


class Attending(NamedTuple):
    """A layer's attention in a step: numbers, or arrays with an entry for each DP group."""

    tokens: Any
    """Rows of the batch."""
    read: Any
    """Cached tokens that are read; of lightning attention, states read and written."""
    pairs: Any
    """Pairs of a query's token with a token that it attends to, times `tile_padding`."""
    expanded: Expanded | None = None
    """The part on expanded keys and values; its pairs times `row_padding`."""
    scored: tuple[Any, ...] = (0, 0)
    """Keys that an indexer reads, and pairs that it scores."""

    def of(self, count: int) -> "Attending":
        """Returns the work of `count` such groups, of one DP group, as numbers."""

        def number(each: np.ndarray) -> float:
            return count * float(each[0])

        expanded = self.expanded and Expanded(*map(number, self.expanded))
        tokens, read, pairs = map(number, self[:3])
        return Attending(tokens, read, pairs, expanded, tuple(map(number, self.scored)))


def prompt_chunks(
    tokens: np.ndarray, length: np.ndarray, pairs: np.ndarray, *, least: float
) -> tuple[Any, Any, Expanded]:
    """Latent attention of prompts' chunks: (tokens read from the cache, pairs in absorbed form, the
    expanded part), of each sequence's tokens in the step, cached tokens after it, and attended
    pairs. A sequence with one token decodes, in absorbed form.

    Chunks of `least` tokens and more run on expanded keys and values alone, those cached before
    them included; others run absorbed. 0: every chunk expands within itself and absorbs before it,
    which passes the maps twice.
    """
    chunk = tokens >= (least or 2)
    read = np.where(chunk, length - tokens, length)
    if least:
        own, before = np.where(chunk, length, 0.0), np.where(chunk, read, 0.0)
        return read, np.where(chunk, 0.0, pairs), Expanded(pairs * chunk, own, before)
    inside = np.where(chunk, np.minimum(pairs, tokens * (tokens + 1) / 2), 0.0)
    own = np.where(chunk, tokens, 0.0)
    return read, pairs - inside, Expanded(inside, own, own)


def tile_padding(group: AttentionLayers, tile: int, tp: int, rows: Any) -> Any:
    """Ratio of the rows that an attention kernel multiplies to its actual rows: a KV head's query
    heads times a sequence's tokens in the step, padded to the products' smallest tile
    (`Hardware.tile_rows`). Rows are a number or an array."""
    spec = group.spec
    heads = spec.q_heads / tp / max(1.0, spec.kv_heads / tp)
    return row_padding(tile, (tile if spec.state_numbers else heads) * rows)


def row_padding(tile: int, rows: Any) -> Any:
    """Ratio of padded rows to `rows`, a number or an array. On expanded keys, of which every query
    head has its own, rows are tokens."""
    return np.ceil(rows / tile) * tile / rows


def busiest_by_chance(ranks: int, rows: float) -> float:
    """Rows of the busiest of equally popular ranks over the mean of `rows`, whose spread is a
    Poisson's."""
    return min(float(ranks), 1 + largest_normal(ranks) / max(rows, 1e-9) ** 0.5)


@functools.cache
def largest_normal(draws: int) -> float:
    """Expected largest of standard normal draws (Blom 1958)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


@functools.lru_cache(4096)
def blocks_met(tokens: int, share: float) -> float:
    """Mean number of blocks of `BLOCK_ROWS` rows that an expert gets from `tokens` tokens, each of
    which chooses it with probability `share`: Σ P(rows > 8 j)."""
    if share >= 1:
        return float(-(-tokens // BLOCK_ROWS))
    rows = np.arange(tokens + 1)
    steps = np.log((tokens - rows[:-1]) / (rows[:-1] + 1)) + math.log(share / (1 - share))
    logs = tokens * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)])
    above = 1 - np.cumsum(np.exp(logs))
    return float(np.sum(above[:tokens:BLOCK_ROWS]))


FILES = ("config.json", "model.yaml")
"""Descriptions of a model that the engine serves, and of one that can only be planned."""


def model_folder(name: str, folder: Path = CONFIGS) -> Path:
    """Returns the path of a known model's description, or of the model folder at this path. Raises
    ConfigError if there is neither; lists the known models."""
    for path in (folder / "models" / name, Path(name)):
        if any((path / file).is_file() for file in FILES):
            return path
    files = (path for file in FILES for path in (folder / "models").glob(f"*/{file}"))
    raise ConfigError(unknown("model", name, sorted({path.parent.name for path in files})))


def model_config(path: Path, *, served: bool = False) -> ModelConfig:
    """Reads the architecture in a model folder. Raises ConfigError if the description is wrong, or
    the engine cannot run the model, or can only plan one that is to be `served`."""
    file, planned = (path / name for name in FILES)
    if not file.is_file():
        if served:
            raise ConfigError(f"the engine cannot run {path.name}, only plan it")
        return read_struct(planned, ModelConfig, _attention)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.get("model_type") not in FAMILIES:
            raise ConfigError(
                f"{file}: model_type {tree.get('model_type')!r} is not one of {', '.join(FAMILIES)}"
            )
        return architecture(tree)
    except (OSError, ValueError, AttributeError, CheckpointError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _attention(kind: type, tree: Any) -> Any:
    """Reads attention of the kind that its `type` names."""
    for found in pkgutil.iter_modules(attention.__path__, f"{attention.__name__}."):
        importlib.import_module(found.name)
    try:
        return msgspec.convert(tree, functools.reduce(operator.or_, Attention.__subclasses__()))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None  # msgspec adds where


def load_model(name: str, folder: Path = CONFIGS) -> CostModel:
    """Returns a known model by name, or the model at this path. Raises ConfigError as
    `model_folder` and `model_config`."""
    path = model_folder(name, folder)
    return cost_model(model_config(path), path.name)

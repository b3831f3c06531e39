"""Qwen3.5 and Qwen3.6 with experts (`model_type` qwen3_5_moe): the text model's tensors.

The text model is Qwen3-Next's, under other names: the projections of linear attention are several
matrices, whose rows lie part by part, each with all heads, and a layer's experts are two tensors.
Tensors of images are passed over.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.qwen3_next import feed_forward, mixing, module_spellings, qwen3_next_config
from jaxserve.checkpoint.reading import SCALE_BLOCK, SCALES
from jaxserve.checkpoint.source import CheckpointNames, Shape, Source, Sources, decoder_names
from jaxserve.checkpoint.tensors import Tensor
from jaxserve.config.attention.gated_delta import DeltaNet
from jaxserve.config.model import Attention, ModelConfig

Parts = dict[str, dict[str, Shape]]
"""Shapes of the tensors of which a file has one, row after row, by its name and theirs."""

SPELLINGS = ((r"^model\.language_model\.", "model."),)


class DividedNames(CheckpointNames):
    """Names of tensors, of which some are parts of those that the files have.

    Attributes:
      parts: those, which the files may also have instead.
    """

    parts: Parts

    def renamed[Value](self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Returns tensors, or their parts, by the names used here. A tensor with another size than
        its parts stays whole, so that it is reported as unexpected."""
        found: dict[str, Any] = {**super().renamed(tensors)}
        for name, shapes in self.parts.items():
            whole: Any = found.get(name)
            numbers = sum(map(math.prod, shapes.values()))
            if isinstance(whole, Tensor) and math.prod(whole.shape) == numbers:
                del found[name]
                for part, shape in shapes.items():
                    found[part] = own = whole._replace(shape=shape)
                    whole = whole._replace(offset=whole.offset + own.nbytes)
        return found


def qwen3_5_names(config: ModelConfig) -> CheckpointNames:
    """Qwen3.5's tensors."""
    plain = decoder_names(config, _attention, feed_forward, ignored=("model.visual.",))
    names = DividedNames(*plain._replace(spellings=SPELLINGS + module_spellings(config)))
    parts: Parts = {}
    for number, kind in enumerate(config.decoder + config.predictors):
        layer = f"model.layers.{number}."
        if isinstance(kind.attention, DeltaNet):
            parts |= _heads(kind.attention, f"{layer}linear_attn.", config.d_model)
        parts |= _experts(f"{layer}mlp.experts.", config.experts, kind.ffn.expert_d_ff, config)
    names.parts = parts | {name + SCALES: _grids(shapes) for name, shapes in parts.items()}
    return names


def _grids(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Divides the scales of FP8 blocks as the matrices are divided, between blocks: if a part ends
    inside a block, these are fewer numbers than the tensor has, which then stays whole."""
    return {
        name + SCALES: (rows // SCALE_BLOCK, -(-columns // SCALE_BLOCK))
        for name, (rows, columns) in shapes.items()
    }


def _heads(sizes: DeltaNet, name: str, d_model: int) -> Parts:
    """Divides the projections into the rows of each key head and its value heads."""
    values = sizes.q_heads // sizes.kv_heads
    rows = dict.fromkeys("qk", sizes.head_dim) | dict.fromkeys("ba", values)
    rows |= dict.fromkeys("vz", values * sizes.value_dim)
    return {
        f"{name}in_proj_{whole}.weight": {
            f"{name}{part}.{head}": (rows[part], d_model)
            for part in whole
            for head in range(sizes.kv_heads)
        }
        for whole in ("qkv", "z", "b", "a")
    }


def _experts(name: str, experts: int, d_ff: int, config: ModelConfig) -> Parts:
    """Divides the two tensors of a layer's experts into three matrices of each."""
    up, down = (d_ff, config.d_model), (config.d_model, d_ff)

    def divided(*projections: str, shape: Shape) -> dict[str, Shape]:
        each = ((expert, part) for expert in range(experts) for part in projections)
        return {f"{name}{expert}.{part}.weight": shape for expert, part in each}

    return {
        f"{name}gate_up_proj": divided("gate_proj", "up_proj", shape=up),
        f"{name}down_proj": divided("down_proj", shape=down),
    }


def _attention(config: ModelConfig, sizes: Attention, name: str) -> Sources:
    sources = mixing(config, sizes, name)
    if isinstance(sizes, DeltaNet):
        name = f"{name.removesuffix('self_attn.')}linear_attn."
        shapes: dict[str, Shape] = {}
        for parts in _heads(sizes, name, config.d_model).values():
            shapes |= parts
        for leaf, rows in (("mix", "qkvz"), ("rates", "ba")):
            names = tuple(f"{name}{part}.{head}" for head in range(sizes.kv_heads) for part in rows)
            sources[f"attention.{leaf}"] = Source(names, tuple(shapes[each] for each in names))
    return sources


QWEN3_5 = Family(qwen3_next_config, qwen3_5_names, "num_experts")

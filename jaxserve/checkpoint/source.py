"""Where the leaves of a model come from: tensor names and shapes, and how they form a leaf.

Written by the families (`step3.py`, …), read by `hf.py`. A leaf of a template (`module.Template`)
is made of one or more tensors, matrices [d_out, d_in]: a slice of each (`view`), concatenated along
d_out or stacked along a new first axis (`stacked`). Further entries of that axis may come from
other tensors (`more`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.config.model import FFNKind, ModelConfig

Shape = tuple[int, ...]


class View(NamedTuple):
    """A part of a tensor: the tensor reshaped, then sliced along one axis."""

    shape: Shape
    axis: int
    start: int
    stop: int


class Source(NamedTuple):
    """The tensors of which a leaf is made."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shape of each tensor in the file."""
    stacked: bool = False
    """Whether each tensor is one entry of the leaf's first axis (an expert)."""
    view: View | None = None
    """Which part of each tensor it is; None: all of it."""
    more: tuple["Source", ...] = ()
    """Of the entries that the leaf's first axis has behind those of the tensors, one each."""

    @property
    def entries(self) -> int:
        """Of the first axis, those of the tensors."""
        return len(self.names) if self.stacked else self.shapes[0][0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Of all tensors, those of `more` included."""
        names = (*self.names, *(name for source in self.more for name in source.names))
        return tuple(dict.fromkeys(names))

    @property
    def reshapes(self) -> bool:
        """Whether it sees tensors in another shape than they have in the file."""
        own = self.view is not None and any(self.view.shape != shape for shape in self.shapes)
        return own or any(source.reshapes for source in self.more)

    @property
    def tensors(self) -> dict[str, Shape]:
        """Name and shape of each tensor in the file."""
        return dict(zip(self.names, self.shapes, strict=True))


Sources = dict[str, Source]


class CheckpointNames(NamedTuple):
    """Every tensor of a model, by block and leaf name."""

    embedding: Sources
    head: Sources
    attention: list[Sources]
    """One entry per layer, those of loaded multi-token-prediction modules included, as in `ffn`."""
    ffn: list[Sources]
    predictions: list[Sources]
    """What a module that is loaded has beside its layer."""
    unloaded: dict[str, Shape]
    """Tensors of the modules that are not loaded."""
    unloaded_layers: range
    """Numbers of their layers."""
    optional: dict[str, Shape]
    """Tensors that duplicate others and may be missing."""
    ignored: tuple[str, ...]
    """Prefixes of tensors of other parts (a vision tower)."""


def vector(name: str, size: int) -> Source:
    """A norm's weight or a bias."""
    return Source((name,), ((size,),))


def matrix(name: str, d_out: int, d_in: int) -> Source:
    """A linear map."""
    return Source((name,), ((d_out, d_in),))


def swiglu(block: str, prefix: str, d_model: int, d_ff: int) -> Sources:
    """The leaves of a dense FFN."""
    return {
        f"{block}.gate": matrix(f"{prefix}gate_proj.weight", d_ff, d_model),
        f"{block}.up": matrix(f"{prefix}up_proj.weight", d_ff, d_model),
        f"{block}.down": matrix(f"{prefix}down_proj.weight", d_model, d_ff),
    }


def per_expert(config: ModelConfig, prefix: str) -> Sources:
    """The leaves of the routed experts, one tensor per expert."""
    shapes = {
        "gate": (config.expert_d_ff, config.d_model),
        "up": (config.expert_d_ff, config.d_model),
        "down": (config.d_model, config.expert_d_ff),
    }
    return {
        f"experts.{leaf}": Source(
            tuple(f"{prefix}{expert}.{leaf}_proj.weight" for expert in range(config.experts)),
            (shape,) * config.experts,
            stacked=True,
        )
        for leaf, shape in shapes.items()
    }


def with_parts(source: Source, matrix: Source, pieces: int, axis: int) -> Source:
    """The source, with a matrix as further entries, divided into equal pieces along an axis."""
    (shape,) = matrix.shapes
    size = shape[axis] // pieces
    cuts = [View(shape, axis, part * size, (part + 1) * size) for part in range(pieces)]
    return source._replace(more=tuple(matrix._replace(view=cut) for cut in cuts))


Block = Callable[[ModelConfig, str, FFNKind], Sources]
"""(config, prefix of the layer's tensors, kind) → the sources of one role's block."""


def decoder_names(
    config: ModelConfig,
    attention: Block,
    ffn: Block,
    *,
    optional: Mapping[str, Shape] = MappingProxyType({}),
    ignored: tuple[str, ...] = (),
) -> CheckpointNames:
    """The tensors of a decoder whose embedding, norm and head have Hugging Face's usual names.

    Args:
      optional, ignored: as in `CheckpointNames`.
    """
    d, table = config.d_model, "model.embed_tokens.weight"
    prefixes = layer_prefixes(config) + mtp_prefixes(config)[: config.modules]
    kinds = [config.kind(layer).ffn for layer in range(config.all_layers)]
    return CheckpointNames(
        embedding={"table": Source((table,), ((config.vocab, d),))},
        head={
            "norm": vector("model.norm.weight", d),
            "weight": matrix(table if config.tied_head else "lm_head.weight", config.vocab, d),
        },
        attention=[attention(config, *layer) for layer in zip(prefixes, kinds, strict=True)],
        ffn=[ffn(config, *layer) for layer in zip(prefixes, kinds, strict=True)],
        predictions=[prediction(config, layer) for layer in prefixes[config.layers :]],
        unloaded=_unloaded(config, attention, ffn),
        unloaded_layers=range(config.all_layers, config.layers + config.mtp_layers),
        optional={**mtp_copies(config), **optional},
        ignored=ignored,
    )


def layer_prefixes(config: ModelConfig) -> list[str]:
    """The prefix of each layer's tensor names."""
    return [f"model.layers.{layer}." for layer in range(config.layers)]


def mtp_prefixes(config: ModelConfig) -> list[str]:
    """The prefixes of the multi-token-prediction modules, numbered after the layers."""
    return [f"model.layers.{config.layers + index}." for index in range(config.mtp_layers)]


def prediction(config: ModelConfig, layer: str) -> Sources:
    """The leaves of `model.prediction.Prediction`."""
    d = config.d_model
    return {
        "token_norm": vector(f"{layer}enorm.weight", d),
        "hidden_norm": vector(f"{layer}hnorm.weight", d),
        "projection": matrix(f"{layer}eh_proj.weight", d, 2 * d),
        "norm": vector(f"{layer}shared_head.norm.weight", d),
    }


def _unloaded(config: ModelConfig, attention: Block, ffn: Block) -> dict[str, Shape]:
    """The tensors of the modules that are not loaded; each has a MoE layer."""
    tensors: dict[str, Shape] = {}
    for layer in mtp_prefixes(config)[config.modules :]:
        blocks = attention(config, layer, "moe"), ffn(config, layer, "moe")
        for sources in (prediction(config, layer), *blocks):
            for source in sources.values():
                tensors |= source.tensors
    return tensors


def mtp_copies(config: ModelConfig) -> dict[str, Shape]:
    """The copies of embedding and head that some checkpoints store with each module."""
    shape = (config.vocab, config.d_model)
    names = ("embed_tokens.weight", "shared_head.head.weight")
    return {f"{layer}{name}": shape for layer in mtp_prefixes(config) for name in names}

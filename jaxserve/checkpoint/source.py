"""Where the leaves of a model come from: tensor names and shapes, and how they form a leaf.

Written by the families (`step3.py`, …), read by `hf.py`. A leaf of a template (`module.Template`)
is made of one or more tensors, matrices [d_out, d_in]: a slice of each (`view`), concatenated along
d_out or stacked along a new first axis (`stacked`). Further entries of that axis may come from
other tensors (`more`).
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, Attention, ModelConfig

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
    """The part of each tensor that is used; None: the whole tensor."""
    more: tuple["Source", ...] = ()
    """Sources of further entries of the leaf's first axis, one each, after the tensors' entries."""
    plus: float = 0.0
    """Number that is added to the tensors' elements, in the leaf's dtype."""
    expert_stack: bool = False
    """True for a tensor of all experts, or one expert's, in a layout of `expert_stacks.py`."""

    def per(self, columns: int) -> "Source":
        """The source of an array with one number for every `columns` columns of these tensors."""
        shapes = tuple((*shape[:-1], shape[-1] // columns) for shape in self.shapes)
        if (view := self.view) is None:
            return self._replace(shapes=shapes)
        last = columns if view.axis == len(view.shape) - 1 else 1
        shape = (*view.shape[:-1], view.shape[-1] // columns)
        cut = View(shape, view.axis, view.start // last, view.stop // last)
        return self._replace(shapes=shapes, view=cut)

    @property
    def entries(self) -> int:
        """Entries of the first axis that come from the tensors."""
        return len(self.names) if self.stacked else self.shapes[0][0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all tensors, those of `more` included."""
        return tuple(dict.fromkeys((*self.names, *(n for one in self.more for n in one.names))))

    @property
    def reshapes(self) -> bool:
        """Whether any tensor is viewed in another shape than it has in the file."""
        own = self.view is not None and any(self.view.shape != shape for shape in self.shapes)
        return own or any(source.reshapes for source in self.more)

    @property
    def tensors(self) -> dict[str, Shape]:
        """Name and shape of each tensor in the file."""
        return dict(zip(self.names, self.shapes, strict=True))


Sources = dict[str, Source]

COPIED = ("embed_tokens", "shared_head.head")


class CheckpointNames(NamedTuple):
    """Every tensor of a model, by block and leaf name."""

    embedding: Sources
    head: Sources
    attention: list[Sources]
    """One entry per layer, those of loaded multi-token-prediction modules included, as in `ffn`."""
    ffn: list[Sources]
    predictions: list[Sources]
    """Leaves of each loaded module outside of its layer."""
    unloaded: Mapping[str, Shape] = MappingProxyType({})
    """Tensors of the modules that are not loaded."""
    unloaded_layers: range = range(0)
    """Layer numbers of the modules that are not loaded."""
    optional: Mapping[str, Shape] = MappingProxyType({})
    """Tensors that duplicate others and may be missing."""
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors of other parts (a vision tower)."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Other spellings of names: patterns, replaced in this order by the names used here."""

    def renamed[Value](self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Returns tensors by the names used here."""
        names = dict(zip(tensors, tensors, strict=True))
        for pattern, known in self.spellings:
            names = {name: re.sub(pattern, known, said) for name, said in names.items()}
        return {names[name]: value for name, value in tensors.items()}


def vector(name: str, size: int) -> Source:
    """A norm's weight without more, or a bias."""
    return Source((name,), ((size,),))


def norm(config: ModelConfig, name: str, size: int) -> Source:
    """A norm's weight, to which 1 is added in models with `unit_norms`."""
    return vector(f"{name}.weight", size)._replace(plus=1.0 * config.unit_norms)


def matrix(name: str, d_out: int, d_in: int) -> Source:
    """A linear map."""
    return Source((name,), ((d_out, d_in),))


def matrices(prefix: str, rows: Mapping[str, int], d_in: int) -> Source:
    """Several linear maps concatenated along d_out. `rows` maps names after the prefix to d_out."""
    names = tuple(f"{prefix}{name}.weight" for name in rows)
    return Source(names, tuple((size, d_in) for size in rows.values()))


PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def swiglu(
    block: str, prefix: str, d_model: int, d_ff: int, matrices: tuple[str, ...] = PROJECTIONS
) -> Sources:
    """The leaves of a dense FFN. `matrices` are the names of gate, up and down."""
    gate, up, down = (f"{prefix}{name}.weight" for name in matrices)
    return {
        f"{block}.gate": matrix(gate, d_ff, d_model),
        f"{block}.up": matrix(up, d_ff, d_model),
        f"{block}.down": matrix(down, d_model, d_ff),
    }


def per_expert(
    config: ModelConfig, ffn: FFN, prefix: str, matrices: tuple[str, ...] = PROJECTIONS
) -> Sources:
    """Leaves of the routed experts, a tensor each; `matrices` names gate, up and down."""
    d_ff, d_model = ffn.expert_d_ff, config.d_model
    shapes = (d_ff, d_model), (d_ff, d_model), (d_model, d_ff)
    return {
        f"experts.{leaf}": Source(
            tuple(f"{prefix}{expert}.{name}.weight" for expert in range(config.experts)),
            (shape,) * config.experts,
            stacked=True,
        )
        for leaf, name, shape in zip(("gate", "up", "down"), matrices, shapes, strict=True)
    }


def feed_forward(
    config: ModelConfig,
    layer: str,
    ffn: FFN,
    part: str = "mlp.",
    names: tuple[str, ...] = PROJECTIONS,
) -> Sources:
    """The leaves of a layer's dense FFN, or of its routed experts and shared expert. `names` are
    those of gate, up and down, and `part` is the prefix of their tensors in the layer."""
    d_model, mlp = config.d_model, f"{layer}{part}"
    if not ffn.router:
        return swiglu("dense", mlp, d_model, ffn.d_ff, names)
    sources = per_expert(config, ffn, f"{mlp}experts.", names)
    if ffn.d_ff:
        sources |= swiglu("dense", f"{mlp}shared_experts.", d_model, ffn.d_ff, names)
    return sources


def grouped_query(config: ModelConfig, sizes: Attention, name: str) -> Sources:
    """The leaves of grouped-query attention; `name` is the prefix of its tensors."""
    assert isinstance(sizes, GQA)
    d, gated = config.d_model, sizes.gate == "columns"
    heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    sources = {
        "attention.query": matrix(f"{name}q_proj.weight", heads * (1 + gated), d),
        "attention.key": matrix(f"{name}k_proj.weight", kv, d),
        "attention.value": matrix(f"{name}v_proj.weight", kv, d),
        "attention.out": matrix(f"{name}o_proj.weight", d, heads),
    }
    if sizes.qk_norm != "none":
        whole = sizes.qk_norm == "columns"
        for leaf, columns in (("query", heads), ("key", kv)):
            size = columns if whole else sizes.head_dim
            sources[f"attention.{leaf}_norm"] = norm(config, f"{name}{leaf[0]}_norm", size)
    if sizes.qkv_bias:
        for leaf, columns in (("query", heads), ("key", kv), ("value", kv)):
            sources[f"attention.{leaf}_bias"] = vector(f"{name}{leaf[0]}_proj.bias", columns)
    if sizes.sinks:
        sources["attention.sinks"] = vector(f"{name}sinks", sizes.q_heads)
    if sizes.gate == "heads":
        sources["attention.gate"] = matrix(f"{name}g_proj.weight", sizes.q_heads, d)
    if sizes.out_bias:
        sources["attention.out_bias"] = vector(f"{name}o_proj.bias", d)
    return sources


def with_parts(source: Source, matrix: Source, pieces: int, axis: int) -> Source:
    """The source, with a matrix as further entries, divided into equal pieces along an axis."""
    (shape,) = matrix.shapes
    size = shape[axis] // pieces
    cuts = [View(shape, axis, part * size, (part + 1) * size) for part in range(pieces)]
    return source._replace(more=tuple(matrix._replace(view=cut) for cut in cuts))


def prediction(config: ModelConfig, layer: str, head: str) -> Sources:
    """The leaves of `model.blocks.Prediction`; `head` is the prefix of tensors after the layer."""
    d = config.d_model
    sources = {
        "token_norm": norm(config, f"{layer}enorm", d),
        "hidden_norm": norm(config, f"{layer}hnorm", d),
        "projection": matrix(f"{layer}eh_proj.weight", d, 2 * d),
        "head.norm" if config.own_heads else "norm": norm(config, f"{head}.norm", d),
    }
    if config.own_heads:
        sources["head.weight"] = matrix(f"{head}.output.weight", config.vocab, d)
    return sources


def decoder_names(
    config: ModelConfig,
    attention: Callable[[ModelConfig, Attention, str], Sources] = grouped_query,
    ffn: Callable[[ModelConfig, str, FFN], Sources] = feed_forward,
    *,
    gate: str = "mlp.gate",
    bias: str = "mlp.gate.e_score_correction_bias",
    shared_head: str = "shared_head",
    outer: str = "",
    ignored: tuple[str, ...] = (),
) -> CheckpointNames:
    """The tensors of a decoder whose embedding, norms and head have Hugging Face's usual names.

    Args:
      attention: makes the sources of a layer's attention from its spec and the prefix of the
        attention's tensors.
      ffn: makes the sources of a layer's FFN from the prefix of the layer's tensors and its spec.
      gate, bias: names of a layer's router matrix, and of its bias where the model has one.
      shared_head: prefix of the tensors that prediction modules have after their layers.
      outer: prefix of all tensors of a decoder that is a part of a larger model.
      ignored: as in `CheckpointNames`.
    """
    d, end = config.d_model, config.all_layers
    table, head = (f"{outer}{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    matrix_shape = config.vocab, d
    # Multi-token-prediction modules are numbered after the layers.
    every = range(config.layers + len(config.predictors))
    prefixes = [f"{outer}model.layers.{layer}." for layer in every]
    attentions, ffns = [], []
    for layer, prefix in enumerate(prefixes):
        kind = config.layer(layer)
        sources = attention(config, kind.attention, f"{prefix}self_attn.") | {
            "input_norm": norm(config, f"{prefix}input_layernorm", d),
            "post_norm": norm(config, f"{prefix}post_attention_layernorm", d),
        }
        if router := kind.ffn.router:
            sources["router.gate"] = matrix(f"{prefix}{gate}.weight", config.experts, d)
            if router.bias:
                sources["router.bias"] = vector(f"{prefix}{bias}", config.experts)
            if router.logit_bias:
                sources["router.logit_bias"] = vector(f"{prefix}{gate}.bias", config.experts)
        attentions.append(sources)
        ffns.append(ffn(config, prefix, kind.ffn))
    modules = prefixes[config.layers :]
    predictions = [prediction(config, prefix, f"{prefix}{shared_head}") for prefix in modules]
    unloaded = (*attentions[end:], *ffns[end:], *predictions[config.modules :])
    # Some checkpoints repeat embedding and head in each module, and a tied head.
    copies = [f"{prefix}{name}.weight" for prefix in modules for name in COPIED]
    copies += [head] if config.tied_head else []
    return CheckpointNames(
        embedding={"table": matrix(table, *matrix_shape)},
        head={
            "norm": norm(config, f"{outer}model.norm", d),
            "weight": matrix(table if config.tied_head else head, *matrix_shape),
        },
        attention=attentions[:end],
        ffn=ffns[:end],
        predictions=predictions[: config.modules],
        unloaded={k: v for part in unloaded for s in part.values() for k, v in s.tensors.items()},
        unloaded_layers=every[end:],
        optional=dict.fromkeys(copies, matrix_shape),
        ignored=ignored,
    )

"""What a family's checkpoint calls things: config keys and tensor names, as data.

One table a family. A leaf of a template (`module.Template`) is made of one or several tensors,
stored [out, in], that stand side by side in its last axis after transposing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.errors import CheckpointError

Shape = tuple[int, ...]


class Source(NamedTuple):
    """Where a leaf comes from: tensors side by side along the leaf's last axis."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shape of each tensor in the file."""
    transpose: bool = False
    """Whether the file holds the last two axes the other way round."""


Sources = dict[str, Source]


class CheckpointNames(NamedTuple):
    """Every tensor of a model, by block and leaf name."""

    embedding: Sources
    head: Sources
    attention: list[Sources]
    """One a layer, as are `ffn`'s."""
    ffn: list[Sources]
    unloaded: dict[str, Shape]
    """Tensors that belong to the model and have no leaf yet (multi-token prediction)."""
    ignored: tuple[str, ...]
    """Prefixes of tensors of other parts (a vision tower)."""


def step3_config(tree: Mapping[str, Any]) -> ModelConfig:
    """Step-3's config.json: `step3_vl` with a `text_config`, or the text model alone."""
    text = dict(tree.get("text_config") or tree)

    def need(*names: str) -> Any:
        for name in names:
            if text.get(name) is not None:
                return text[name]
        raise CheckpointError(f"config.json: {' or '.join(names)} is missing")

    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or rope.get("rope_type", "default")
    if scaling not in (None, "default") and scaling != {"rope_type": "default"}:
        raise CheckpointError(f"config.json: rope_scaling = {scaling!r} is not supported here")
    theta = text.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        raise CheckpointError("config.json: rope_theta is missing")
    layers = int(need("num_hidden_layers"))
    return ModelConfig(
        vocab=need("vocab_size"),
        d_model=need("hidden_size"),
        layers=layers,
        q_heads=need("num_attention_heads"),
        kv_heads=need("num_attention_groups"),
        head_dim=need("head_dim"),
        latent=need("share_q_dim"),
        d_ff=need("intermediate_size"),
        moe_layers=_layer_set(text.get("moe_layers_enum", ()), layers),
        experts=need("moe_num_experts"),
        top_k=need("moe_top_k"),
        expert_d_ff=need("moe_intermediate_size"),
        shared_d_ff=need("share_expert_dim"),
        renormalise=bool(text.get("norm_expert_weight", False)),
        rope_theta=float(theta),
        norm_epsilon=float(need("rms_norm_eps")),
        max_positions=need("max_position_embeddings", "max_position_embedding", "max_seq_len"),
        tied_head=bool(text.get("tie_word_embeddings", False)),
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
    )


def _layer_set(value: Any, layers: int) -> frozenset[int]:
    """`"4,5,6"`, `[4, 5, 6]` or a tuple."""
    items = value.split(",") if isinstance(value, str) else value or ()
    chosen = frozenset(int(item) for item in items if str(item).strip())
    if beyond := sorted(layer for layer in chosen if not 0 <= layer < layers):
        raise CheckpointError(f"config.json: moe_layers_enum names {beyond} of {layers} layers")
    return chosen


def step3_names(config: ModelConfig) -> CheckpointNames:
    """Step-3's tensors."""
    d, vocab = config.d_model, config.vocab
    table = Source(("model.embed_tokens.weight",), ((vocab, d),))
    head = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    return CheckpointNames(
        embedding={"table": table},
        head={
            "norm": _vector("model.norm.weight", d),
            "weight": Source((head,), ((vocab, d),), transpose=True),
        },
        attention=[
            _step3_attention(config, f"model.layers.{layer}.", config.kind(layer))
            for layer in range(config.layers)
        ],
        ffn=[
            _step3_ffn(config, f"model.layers.{layer}.", config.kind(layer))
            for layer in range(config.layers)
        ],
        unloaded=_step3_mtp(config),
        ignored=("vision_model.", "vit_"),
    )


def _vector(name: str, size: int) -> Source:
    return Source((name,), ((size,),))


def _matrix(name: str, d_out: int, d_in: int) -> Source:
    return Source((name,), ((d_out, d_in),), transpose=True)


def _step3_attention(config: ModelConfig, layer: str, kind: LayerKind) -> Sources:
    d, attention = config.d_model, f"{layer}self_attn."
    heads, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    down = ("q_proj", "k_proj", "v_proj")
    sources = {
        "input_norm": _vector(f"{layer}input_layernorm.weight", d),
        "attention.down": Source(
            tuple(f"{attention}{name}.weight" for name in down),
            ((config.latent, d), (kv, d), (kv, d)),
            transpose=True,
        ),
        "attention.inter_norm": _vector(f"{attention}inter_norm.weight", config.latent),
        "attention.up": _matrix(f"{attention}wq.weight", heads, config.latent),
        "attention.out": _matrix(f"{attention}o_proj.weight", d, heads),
        "post_norm": _vector(f"{layer}post_attention_layernorm.weight", d),
    }
    if kind == "moe":
        sources["router.gate"] = _matrix(f"{layer}moe.gate.weight", config.experts, d)
    return sources


def _step3_ffn(config: ModelConfig, layer: str, kind: LayerKind) -> Sources:
    d, experts, d_ff = config.d_model, config.experts, config.expert_d_ff
    if kind == "dense":
        return _swiglu("dense", f"{layer}mlp.", d, config.d_ff)
    sources = _swiglu("dense", f"{layer}share_expert.", d, config.shared_d_ff)
    for leaf in ("gate", "up"):
        sources[f"experts.{leaf}"] = Source(
            (f"{layer}moe.{leaf}_proj.weight",), ((experts, d_ff, d),), transpose=True
        )
    sources["experts.down"] = Source(
        (f"{layer}moe.down_proj.weight",), ((experts, d, d_ff),), transpose=True
    )
    return sources


def _swiglu(block: str, prefix: str, d: int, d_ff: int) -> Sources:
    return {
        f"{block}.gate": _matrix(f"{prefix}gate_proj.weight", d_ff, d),
        f"{block}.up": _matrix(f"{prefix}up_proj.weight", d_ff, d),
        f"{block}.down": _matrix(f"{prefix}down_proj.weight", d, d_ff),
    }


def _step3_mtp(config: ModelConfig) -> dict[str, Shape]:
    """The multi-token-prediction modules' tensors: DeepSeek-V3's form, stored as further layers."""
    tensors: dict[str, Shape] = {}
    for index in range(config.mtp_layers):
        layer = f"model.layers.{config.layers + index}."
        d = config.d_model
        tensors |= {
            f"{layer}enorm.weight": (d,),
            f"{layer}hnorm.weight": (d,),
            f"{layer}eh_proj.weight": (d, 2 * d),
            f"{layer}shared_head.norm.weight": (d,),
        }
        for sources in (
            _step3_attention(config, layer, "moe"),
            _step3_ffn(config, layer, "moe"),
        ):
            for source in sources.values():
                tensors |= dict(zip(source.names, source.shapes, strict=True))
    return tensors


class Family(NamedTuple):
    """How to read one family."""

    config: Any
    names: Any


FAMILIES: dict[str, Family] = {
    "step3_vl": Family(step3_config, step3_names),
    "step3_text": Family(step3_config, step3_names),
}
"""By `model_type` of config.json."""

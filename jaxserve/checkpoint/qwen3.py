"""Qwen3, dense and with experts (`model_type` qwen3 and qwen3_moe): their config.json and their
tensors."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.quantization_config import stored_format
from jaxserve.checkpoint.source import (
    CheckpointNames,
    Sources,
    decoder_names,
    matrix,
    per_expert,
    swiglu,
    vector,
)
from jaxserve.config.model import GQA, FFNKind, ModelConfig, Router


def qwen3_config(tree: Mapping[str, Any], ignored: Collection[str] = ()) -> ModelConfig:
    """Qwen3's config.json.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    entries = Entries(tree, ignored)
    decoder = entries.decoder()
    layers, d_model = decoder["layers"], decoder["d_model"]
    q_heads = entries.size("num_attention_heads")
    moe = tree.get("model_type") == "qwen3_moe"
    # The defaults of transformers, whose dense and MoE classes differ.
    head_dim = entries.size("head_dim", least=2, default=d_model // q_heads if moe else 128)
    bias = entries.flag("attention_bias")
    attention = GQA(
        q_heads=q_heads,
        kv_heads=entries.size("num_key_value_heads", default=q_heads),
        head_dim=head_dim,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    router = _router(entries) if moe else None
    moe_layers = _moe_layers(entries, layers) if router else frozenset[int]()
    window, window_layers = _window(entries, layers, all_layers=moe)
    rope, positions = entries.rope("head_dim", head_dim), entries.size("max_position_embeddings")
    if rope.yarn:
        # For long contexts, users add `rope_scaling` to the released file and change nothing else.
        positions = max(positions, int(rope.yarn.factor * rope.yarn.original_positions))
    config = ModelConfig(
        **decoder,
        attention=attention,
        rope=rope,
        moe_layers=moe_layers,
        router=router if moe_layers else None,
        expert_d_ff=entries.size("moe_intermediate_size") if moe_layers else 0,
        window=window if window_layers else 0,
        window_layers=window_layers,
        max_positions=positions,
        stored=stored_format(entries),
    )
    entries.raise_problems()
    if router:
        entries.router(router, "num_experts", "num_experts_per_tok")
    entries.only("hidden_act", "silu")
    # Present in some files, always with this value.
    entries.only("use_qk_norm", True)
    entries.only("qkv_bias", bias)
    entries.only("shared_expert_intermediate_size", 0)
    entries.meaningless("moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step")
    names = "num_attention_heads", "num_key_value_heads"
    entries.multiple(names[0], q_heads, names[1], attention.kv_heads)
    entries.refuse_unread()
    entries.raise_problems()
    return config


def _router(entries: Entries) -> Router | None:
    experts = entries.size("num_experts", "num_local_experts", least=0, default=0)
    entries.meaningless("num_local_experts")
    rule = Router(
        experts=experts,
        top_k=entries.size("num_experts_per_tok", least=0, default=None if experts else 0),
        renormalise=entries.flag("norm_topk_prob"),
    )
    return rule if experts else None


def _moe_layers(entries: Entries, layers: int) -> frozenset[int]:
    """The MoE layers: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = entries.size("decoder_sparse_step", default=1)
    dense = entries.layers("mlp_only_layers", ())
    return frozenset(
        layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense
    )


def _window(entries: Entries, layers: int, *, all_layers: bool) -> tuple[int, frozenset[int]]:
    """The sliding window and the layers that have it: those named by `layer_types`, or all from
    `max_window_layers` on (all layers of a model with experts)."""
    used = entries.flag("use_sliding_window")
    window = entries.size("sliding_window") if used else 0
    first = entries.size("max_window_layers", least=0, default=28)
    types = entries.any("layer_types")
    entries.meaningless("sliding_window")
    if types is None:
        first = 0 if all_layers else first
        return window, frozenset(range(first, layers)) if used else frozenset()
    known = ("full_attention", "sliding_attention")
    fits = isinstance(types, list) and len(types) == layers
    if not fits or not all(kind in known for kind in types):
        entries.problems.append(
            f"layer_types = {types!r} is not one of {known} for each of {layers} layers"
        )
        return 0, frozenset()
    sliding = frozenset(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and not used:
        entries.problems.append(
            "layer_types has sliding_attention, but use_sliding_window is not true"
        )
    return window, frozenset(range(layers)) if all_layers and used else sliding


def qwen3_names(config: ModelConfig) -> CheckpointNames:
    """Qwen3's tensors."""
    tied = {"lm_head.weight": (config.vocab, config.d_model)} if config.tied_head else {}
    return decoder_names(config, _attention_sources, _ffn_sources, optional=tied)


def _attention_sources(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    d, sizes, name = config.d_model, config.attention, f"{layer}self_attn."
    assert isinstance(sizes, GQA)
    heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    sources = {
        "input_norm": vector(f"{layer}input_layernorm.weight", d),
        "attention.query": matrix(f"{name}q_proj.weight", heads, d),
        "attention.key": matrix(f"{name}k_proj.weight", kv, d),
        "attention.value": matrix(f"{name}v_proj.weight", kv, d),
        "attention.out": matrix(f"{name}o_proj.weight", d, heads),
        "attention.query_norm": vector(f"{name}q_norm.weight", sizes.head_dim),
        "attention.key_norm": vector(f"{name}k_norm.weight", sizes.head_dim),
        "post_norm": vector(f"{layer}post_attention_layernorm.weight", d),
    }
    if sizes.qkv_bias:
        sources |= {
            "attention.query_bias": vector(f"{name}q_proj.bias", heads),
            "attention.key_bias": vector(f"{name}k_proj.bias", kv),
            "attention.value_bias": vector(f"{name}v_proj.bias", kv),
            "attention.out_bias": vector(f"{name}o_proj.bias", d),
        }
    if kind == "moe":
        sources["router.gate"] = matrix(f"{layer}mlp.gate.weight", config.experts, d)
    return sources


def _ffn_sources(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    if kind == "dense":
        return swiglu("dense", f"{layer}mlp.", config.d_model, config.d_ff)
    return per_expert(config, f"{layer}mlp.experts.")

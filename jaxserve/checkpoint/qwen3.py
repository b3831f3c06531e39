"""Qwen3, dense and with experts (`model_type` qwen3 and qwen3_moe): their config.json."""

import msgspec

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import decoder_names
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, LayerKind, ModelConfig, RouterSpec


def qwen3_config(entries: Entries) -> ModelConfig:
    """Qwen3's config.json."""
    decoder = entries.decoder()
    layers, dense = decoder.pop("layers"), FFN(d_ff=decoder.pop("d_ff"))
    moe = entries.any("model_type") == "qwen3_moe"
    # The defaults of transformers, whose dense and MoE classes differ.
    heads = entries.heads(decoder["d_model"], 0 if moe else 128)
    bias = entries.flag("attention_bias")
    rule = _router(entries) if moe else None
    moe_layers = _moe_layers(entries, layers) if rule else frozenset[int]()
    window, window_layers = _window(entries, layers, all_layers=moe)
    rope = entries.rope("head_dim", heads["head_dim"])
    if rope.yarn:
        # For long contexts, users add `rope_scaling` to the released file and change nothing else.
        reach = int(rope.yarn.factor * rope.yarn.original_positions)
        decoder["max_positions"] = max(decoder["max_positions"], reach)
    # Present in some files, always with this value.
    entries.only("use_qk_norm", True)
    entries.only("qkv_bias", bias)
    entries.only("shared_expert_intermediate_size", 0)
    entries.meaningless("moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step")
    expert_d_ff = entries.size("moe_intermediate_size") if moe_layers else 0
    moe = FFN(router=rule, expert_d_ff=expert_d_ff)
    full = GQA(**heads, rope=rope, qk_norm="heads", qkv_bias=bias, out_bias=bias)
    windowed = msgspec.structs.replace(full, window=window)
    kinds = [
        LayerKind(windowed if n in window_layers else full, moe if n in moe_layers else dense)
        for n in range(layers)
    ]
    return ModelConfig(**decoder, decoder=tuple(kinds))


def _router(entries: Entries) -> RouterSpec | None:
    experts = entries.size("num_experts", "num_local_experts", least=0, default=0)
    rule = RouterSpec(
        experts=experts,
        top_k=entries.size("num_experts_per_tok", least=0, default=None if experts else 0),
        renormalise=entries.flag("norm_topk_prob"),
    )
    return rule if experts else None


def _moe_layers(entries: Entries, layers: int) -> frozenset[int]:
    """The MoE layers: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = entries.size("decoder_sparse_step", default=1)
    dense = entries.layers("mlp_only_layers", ())
    return frozenset(range(step - 1, layers, step)) - dense


def _window(entries: Entries, layers: int, *, all_layers: bool) -> tuple[int, frozenset[int]]:
    """The sliding window and the layers that have it: those named by `layer_types`, or all from
    `max_window_layers` on (all layers of a model with experts)."""
    used = entries.flag("use_sliding_window")
    window = entries.size("sliding_window") if used else 0
    first = entries.size("max_window_layers", least=0, default=28)
    types = entries.names("layer_types")
    entries.meaningless("sliding_window")
    sliding = frozenset(range(0 if all_layers else first, layers)) if used else frozenset[int]()
    if not types:
        return window, sliding
    known = ("full_attention", "sliding_attention")
    if len(types) != layers or not set(types) <= set(known):
        said = f"layer_types = {types!r} is not one of {known} for each of {layers} layers"
        entries.problems.append(said)
    elif not used and known[1] in types:
        said = "layer_types has sliding_attention, but use_sliding_window is not true"
        entries.problems.append(said)
    elif not all_layers:
        sliding = frozenset(layer for layer, kind in enumerate(types) if kind == known[1])
    return window, sliding


QWEN3 = Family(qwen3_config, decoder_names, "num_experts")

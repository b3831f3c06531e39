"""Step-3.5-Flash, and the text model of Step-3.7-Flash (`model_type` step3p5 and step3p7): their
config.json and their tensors."""

from typing import Any

import msgspec

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.source import CheckpointNames, decoder_names
from jaxserve.checkpoint.step3 import STEP3, moe_ffn, step3_ffn
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, LayerKind, ModelConfig
from pallas_kernels.activation import Activation

WINDOWED = "sliding_attention"
LIMITS = "swiglu_limits", "swiglu_limits_shared"
PER_LAYER = "layer_types", "rope_theta", "partial_rotary_factors", *LIMITS
"""Lists with an entry for every layer, those of prediction modules included; or one entry for all
layers. transformers 5 writes the modules' types of layers apart, and RoPE's entries by type."""


def step3p5_config(entries: Entries) -> ModelConfig:
    """Step-3.5-Flash's config.json."""
    decoder = entries.decoder()
    layers, d_ff = decoder.pop("layers"), decoder.pop("d_ff")
    count = layers + entries.size("num_nextn_predict_layers", least=0, default=0)
    ffns = entries.names("mlp_layer_types") + entries.names("mtp_mlp_layer_types")
    sparse = [n for n, ffn in enumerate(ffns) if ffn != "dense"]
    moe_layers = entries.layers("moe_layers_enum", sparse if ffns else range(1, layers))
    scaling = entries.number("moe_router_scaling_factor")
    # transformers 5 always has gates that add up to 1 and gates of heads, and writes neither key.
    rule: dict[str, Any] = {"renormalise": entries.flag("norm_expert_weight", default=True)}
    rule |= {"score": "sigmoid", "float32_logits": True, "scaling": scaling, "bias": True}
    moe = moe_ffn(entries, **rule)
    full, windowed = _attention(entries, decoder["d_model"])
    entries.only("query_pre_attn_scalar", full["head_dim"])

    def kind(n: int, own: Entries) -> LayerKind:
        own.only("layer_types", "full_attention", WINDOWED)
        attention = windowed if own.any("layer_types") == WINDOWED else full
        share = own.number("partial_rotary_factors", default=1.0)
        rope = own.rope("head_dim", attention["head_dim"], share=share)
        routed, shared = (
            Activation(limit=own.number(name) if own.any(name) else 0.0) for name in LIMITS
        )
        ffn = FFN(d_ff=d_ff, activation=shared)
        if n in moe_layers:
            ffn = msgspec.structs.replace(moe, activation=shared, expert_activation=routed)
        entries.problems += [said for said in own.problems if said not in entries.problems]
        return LayerKind(GQA(**attention, rope=rope, qk_norm="heads"), ffn)

    kinds = tuple(map(kind, range(count), _by_layer(entries, layers, count)))
    if len(set(kinds[layers:])) > 1:
        entries.problems.append("layers of prediction modules differ")
    for key in ("use_moe", "use_moe_router_bias", "use_qk_norm", "need_fp32_gate", "zero_centered"):
        entries.only(key, True)
    entries.only("att_impl_type", "GQA")
    entries.only("moe_router_activation", "sigmoid")
    # moe_layers_enum replaces the first two; the last repeats num_sliding_attention_heads.
    entries.meaningless("moe_layer_offset", "moe_every_n_layer", "max_seq_len", "per_layer_config")
    decoder |= {"decoder": kinds[:layers], "predictors": kinds[layers:]}
    return ModelConfig(**decoder, own_heads=True, unit_norms=True)


def _attention(entries: Entries, d_model: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the attention of full and of windowed layers, as fields of `GQA`."""
    gate = "heads" if entries.flag("use_head_wise_attn_gate", default=True) else "none"
    full = entries.heads(d_model) | {"gate": gate}
    other = entries.inside("attention_other_setting", entries.section("attention_other_setting"))
    q_heads = entries.size("num_sliding_attention_heads", default=full["q_heads"])
    windowed = {
        "q_heads": other.size("num_attention_heads", default=q_heads),
        "kv_heads": other.size("num_attention_groups", default=full["kv_heads"]),
        "head_dim": other.size("head_dim", least=2, default=full["head_dim"]),
        "window": entries.size("sliding_window"),
    }
    other.only("attention_type", WINDOWED)
    other.meaningless("true_head_dim")
    other.refuse_unread()
    entries.problems += other.problems
    return full, full | windowed


def _by_layer(entries: Entries, layers: int, count: int) -> list[Entries]:
    """Returns the entries of each layer. Frequencies of some types of layers are scaled."""
    scaling, scaled = entries.any("rope_scaling"), entries.names("yarn_only_types")
    by_type, modules = entries.section("rope_parameters"), entries.names("mtp_layer_types")
    lists = {name: entries.any(name) for name in PER_LAYER}
    for name, given in lists.items():
        values = given if isinstance(given, list) else [given] * count
        if modules and len(values) == layers:
            values = values + (modules if name == "layer_types" else [None] * len(modules))
        if len(values) < count:
            entries.problems.append(f"{name} has {len(values)} entries for {count} layers")
        lists[name] = values + values[-1:] * count
    types = lists["layer_types"]
    lists["rope_scaling"] = [scaling if not scaled or kind in scaled else None for kind in types]
    lists["rope_parameters"] = [by_type.get(str(kind)) for kind in types]
    return [
        entries.inside(f"layer {n}", {name: values[n] for name, values in lists.items()})
        for n in range(count)
    ]


def step3p5_names(config: ModelConfig) -> CheckpointNames:
    """Step-3.5's tensors."""
    return decoder_names(
        config,
        ffn=step3_ffn,
        gate="moe.gate",
        bias="moe.router_bias",
        shared_head="transformer.shared_head",
        ignored=("vision_model.", "vit_", "model.vision_model.", "model.multi_modal_projector."),
    )


STEP3P5 = STEP3._replace(config=step3p5_config, names=step3p5_names)

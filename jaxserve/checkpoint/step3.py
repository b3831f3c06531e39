"""Step-3: its config.json and its tensors (`model_type` step3_vl and step3_text)."""

import functools
from typing import Any

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import (
    CheckpointNames,
    Source,
    Sources,
    decoder_names,
    matrices,
    matrix,
    swiglu,
    vector,
)
from jaxserve.config.attention.mfa import MFA
from jaxserve.config.model import FFN, Attention, LayerKind, ModelConfig, RouterSpec


def step3_config(entries: Entries) -> ModelConfig:
    """Step-3's config.json: the `text_config` of `step3_vl`, or the text model alone."""
    decoder = entries.decoder()
    layers, dense = decoder.pop("layers"), FFN(d_ff=decoder.pop("d_ff"))
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    moe_layers = entries.layers("moe_layers_enum", range(1, layers))
    head_dim = entries.size("head_dim", least=2)
    attention = MFA(
        q_heads=entries.size("num_attention_heads"),
        kv_heads=entries.size("num_attention_groups"),
        head_dim=head_dim,
        latent=entries.size("share_q_dim"),
        rope=entries.rope("head_dim", head_dim),
    )
    # A model without experts may leave out their sizes.
    none, renormalise = None if moe_layers or mtp_layers else 0, entries.flag("norm_expert_weight")
    moe = moe_ffn(entries, none, renormalise=renormalise)
    ffns = (moe if layer in moe_layers else dense for layer in range(layers))
    config = ModelConfig(
        **decoder,
        decoder=tuple(LayerKind(attention, ffn) for ffn in ffns),
        predictors=(LayerKind(attention, moe),) * mtp_layers,
    )
    entries.only("attention_bias", False)
    entries.meaningless("text_config", "vision_config", "image_token_id")
    if beyond := sorted(layer for layer in moe_layers if not 0 <= layer < layers):
        entries.problems.append(f"moe_layers_enum names {beyond} of {layers} layers")
    return config


def moe_ffn(entries: Entries, none: int | None = None, **rule: Any) -> FFN:
    """Reads the FFN with experts.

    Args:
      none: sizes where the file does not say them.
      rule: fields of its `RouterSpec`.
    """
    size = functools.partial(entries.size, least=0, default=none)
    return FFN(
        d_ff=size("share_expert_dim"),
        router=RouterSpec(
            experts=size("moe_num_experts", "n_routed_experts"),
            top_k=size("moe_top_k", "num_experts_per_tok"),
            **rule,
        ),
        expert_d_ff=size("moe_intermediate_size"),
    )


def step3_names(config: ModelConfig) -> CheckpointNames:
    """Step-3's tensors."""
    towers = ("vision_model.", "vit_")
    return decoder_names(config, _step3_attention, step3_ffn, gate="moe.gate", ignored=towers)


def _step3_attention(config: ModelConfig, sizes: Attention, name: str) -> Sources:
    d = config.d_model
    assert isinstance(sizes, MFA)
    heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    down = {"q_proj": sizes.latent, "k_proj": kv, "v_proj": kv}
    return {
        "attention.down": matrices(name, down, d),
        "attention.inter_norm": vector(f"{name}inter_norm.weight", sizes.latent),
        "attention.up": matrix(f"{name}wq.weight", heads, sizes.latent),
        "attention.out": matrix(f"{name}o_proj.weight", d, heads),
    }


def step3_ffn(config: ModelConfig, layer: str, ffn: FFN) -> Sources:
    """The leaves of a layer's FFN; `layer` is the prefix of its tensors."""
    d, experts, d_ff = config.d_model, config.experts, ffn.expert_d_ff
    if not ffn.router:
        return swiglu("dense", f"{layer}mlp.", d, ffn.d_ff)
    shapes = {"gate": (experts, d_ff, d), "up": (experts, d_ff, d), "down": (experts, d, d_ff)}
    sources = {
        f"experts.{leaf}": Source((f"{layer}moe.{leaf}_proj.weight",), (shape,))
        for leaf, shape in shapes.items()
    }
    return sources | (swiglu("dense", f"{layer}share_expert.", d, ffn.d_ff) if ffn.d_ff else {})


STEP3 = Family(step3_config, step3_names, "moe_num_experts", "moe_top_k", "num_attention_groups")

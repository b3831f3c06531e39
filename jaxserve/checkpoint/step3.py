"""Step-3: its config.json and its tensors (`model_type` step3_vl and step3_text)."""

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.source import (
    CheckpointNames,
    Source,
    Sources,
    decoder_names,
    matrix,
    swiglu,
    vector,
)
from jaxserve.config.model import MFA, FFNKind, ModelConfig, Router


def step3_config(entries: Entries) -> ModelConfig:
    """Step-3's config.json: the `text_config` of `step3_vl`, or the text model alone."""
    decoder = entries.decoder()
    layers = decoder["layers"]
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    moe_layers = entries.layers("moe_layers_enum", range(1, layers))
    # A model without experts may leave out their sizes.
    none = None if moe_layers or mtp_layers else 0
    head_dim = entries.size("head_dim", least=2)
    attention = MFA(
        q_heads=entries.size("num_attention_heads"),
        kv_heads=entries.size("num_attention_groups"),
        head_dim=head_dim,
        latent=entries.size("share_q_dim"),
    )
    router = Router(
        experts=entries.size("moe_num_experts", least=0, default=none),
        top_k=entries.size("moe_top_k", least=0, default=none),
        renormalise=entries.flag("norm_expert_weight"),
    )
    config = ModelConfig(
        **decoder,
        attention=attention,
        rope=entries.rope("head_dim", head_dim),
        moe_layers=moe_layers,
        router=router if moe_layers or mtp_layers else None,
        expert_d_ff=entries.size("moe_intermediate_size", least=0, default=none),
        shared_d_ff=entries.size("share_expert_dim", least=0, default=none),
        mtp_layers=mtp_layers,
    )
    entries.only("attention_bias", False)
    entries.meaningless("text_config", "vision_config", "image_token_id")
    if beyond := sorted(layer for layer in moe_layers if not 0 <= layer < layers):
        entries.problems.append(f"moe_layers_enum names {beyond} of {layers} layers")
    return config


def step3_names(config: ModelConfig) -> CheckpointNames:
    """Step-3's tensors."""
    towers = ("vision_model.", "vit_")
    return decoder_names(config, _step3_attention, _step3_ffn, gate="moe.gate", ignored=towers)


def _step3_attention(config: ModelConfig, name: str) -> Sources:
    d, sizes = config.d_model, config.attention
    assert isinstance(sizes, MFA)
    heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    down = ("q_proj", "k_proj", "v_proj")
    return {
        "attention.down": Source(
            tuple(f"{name}{each}.weight" for each in down),
            ((sizes.latent, d), (kv, d), (kv, d)),
        ),
        "attention.inter_norm": vector(f"{name}inter_norm.weight", sizes.latent),
        "attention.up": matrix(f"{name}wq.weight", heads, sizes.latent),
        "attention.out": matrix(f"{name}o_proj.weight", d, heads),
    }


def _step3_ffn(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    d, experts, d_ff = config.d_model, config.experts, config.expert_d_ff
    if kind == "dense":
        return swiglu("dense", f"{layer}mlp.", d, config.d_ff)
    sources: Sources = {}
    if config.shared_d_ff:
        sources |= swiglu("dense", f"{layer}share_expert.", d, config.shared_d_ff)
    for leaf in ("gate", "up"):
        sources[f"experts.{leaf}"] = Source(
            (f"{layer}moe.{leaf}_proj.weight",), ((experts, d_ff, d),)
        )
    sources["experts.down"] = Source((f"{layer}moe.down_proj.weight",), ((experts, d, d_ff),))
    return sources

"""Step-3: its config.json and its tensors (`model_type` step3_vl and step3_text)."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.quantization_config import stored_format
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
from jaxserve.errors import CheckpointError


def step3_config(tree: Mapping[str, Any], ignored: Collection[str] = ()) -> ModelConfig:
    """Step-3's config.json: `step3_vl` with a `text_config`, or the text model alone.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    text = tree if tree.get("text_config") is None else tree["text_config"]
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config = {text!r} is not an object")
    # `quantization_config` is an entry of the whole model, not of its text_config.
    outer = {name: tree[name] for name in ("quantization_config",) if name in tree}
    entries = Entries({**outer, **text}, ignored)
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
        max_positions=entries.size(
            "max_position_embeddings", "max_position_embedding", "max_seq_len"
        ),
        stored=stored_format(entries),
        mtp_layers=mtp_layers,
    )
    entries.raise_problems()
    if moe_layers or mtp_layers:
        entries.router(router, "moe_num_experts", "moe_top_k")
    entries.only("hidden_act", "silu")
    entries.only("attention_bias", False)
    entries.meaningless("text_config", "vision_config", "image_token_id")
    # Synonyms of entries read above.
    entries.meaningless("max_position_embedding", "max_seq_len")
    names = "num_attention_heads", "num_attention_groups"
    entries.multiple(names[0], attention.q_heads, names[1], attention.kv_heads)
    if beyond := sorted(layer for layer in moe_layers if not 0 <= layer < layers):
        entries.problems.append(f"moe_layers_enum names {beyond} of {layers} layers")
    entries.refuse_unread()
    entries.raise_problems()
    return config


def step3_names(config: ModelConfig) -> CheckpointNames:
    """Step-3's tensors."""
    towers = ("vision_model.", "vit_")
    return decoder_names(config, _step3_attention, _step3_ffn, ignored=towers)


def _step3_attention(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    d, attention, sizes = config.d_model, f"{layer}self_attn.", config.attention
    assert isinstance(sizes, MFA)
    heads, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    down = ("q_proj", "k_proj", "v_proj")
    sources = {
        "input_norm": vector(f"{layer}input_layernorm.weight", d),
        "attention.down": Source(
            tuple(f"{attention}{name}.weight" for name in down),
            ((sizes.latent, d), (kv, d), (kv, d)),
        ),
        "attention.inter_norm": vector(f"{attention}inter_norm.weight", sizes.latent),
        "attention.up": matrix(f"{attention}wq.weight", heads, sizes.latent),
        "attention.out": matrix(f"{attention}o_proj.weight", d, heads),
        "post_norm": vector(f"{layer}post_attention_layernorm.weight", d),
    }
    if kind == "moe":
        sources["router.gate"] = matrix(f"{layer}moe.gate.weight", config.experts, d)
    return sources


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

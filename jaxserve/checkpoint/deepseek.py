"""DeepSeek-V3 and R1, and Kimi K2, which is of the same architecture (`model_type` deepseek_v3 and
kimi_k2): their config.json and their tensors."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.checkpoint.entries import Entries, yarn_magnitude
from jaxserve.checkpoint.quantization_config import stored_format
from jaxserve.checkpoint.source import (
    CheckpointNames,
    Source,
    Sources,
    View,
    decoder_names,
    layer_prefixes,
    matrix,
    mtp_prefixes,
    per_expert,
    swiglu,
    vector,
)
from jaxserve.config.model import MLA, FFNKind, ModelConfig, Rope, Router


def deepseek_config(tree: Mapping[str, Any], ignored: Collection[str] = ()) -> ModelConfig:
    """DeepSeek-V3's config.json.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    entries = Entries(tree, ignored)
    decoder = entries.decoder()
    layers = decoder["layers"]
    first, every = (
        entries.size("first_k_dense_replace", least=0, default=0),
        entries.size("moe_layer_freq", default=1),
    )
    experts = entries.size("n_routed_experts", "num_local_experts", least=0, default=0)
    expert_d_ff = entries.size("moe_intermediate_size", least=0, default=0 if not experts else None)
    moe_layers = {layer for layer in range(first, layers) if layer % every == 0 and experts}
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    rope_dim = entries.size("qk_rope_head_dim")
    rope = entries.rope(
        "qk_rope_head_dim", rope_dim, interleaved=entries.flag("rope_interleave", default=True)
    )
    router = _router(entries, experts)
    config = ModelConfig(
        **decoder,
        attention=_attention(entries, rope, rope_dim),
        rope=rope,
        moe_layers=frozenset(moe_layers),
        router=router if moe_layers or mtp_layers else None,
        expert_d_ff=expert_d_ff,
        shared_d_ff=expert_d_ff * entries.size("n_shared_experts", least=0, default=0),
        max_positions=entries.size("max_position_embeddings"),
        stored=stored_format(entries),
        mtp_layers=mtp_layers,
    )
    entries.raise_problems()
    if moe_layers or mtp_layers:
        entries.router(router, "n_routed_experts", "num_experts_per_tok")
    entries.only("hidden_act", "silu")
    entries.only("topk_method", "noaux_tc")
    entries.only("mlp_bias", False)
    # Implied by the other attention entries.
    entries.meaningless("num_key_value_heads", "head_dim", "qk_head_dim")
    entries.refuse_unread()
    entries.raise_problems()
    return config


def _attention(entries: Entries, rope: Rope, rope_dim: int) -> MLA:
    nope_dim = entries.size("qk_nope_head_dim")
    scale = (nope_dim + rope_dim) ** -0.5
    scaling = entries.section("rope_parameters") | entries.section("rope_scaling")
    of_all = scaling.get("mscale_all_dim")
    if rope.yarn is not None and isinstance(of_all, int | float):
        scale *= yarn_magnitude(rope.yarn.factor, of_all) ** 2
    return MLA(
        q_heads=entries.size("num_attention_heads"),
        q_latent=entries.size("q_lora_rank", least=0, default=0),
        kv_latent=entries.size("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=entries.size("v_head_dim"),
        scale=scale,
        bias=entries.flag("attention_bias"),
    )


def _router(entries: Entries, experts: int) -> Router:
    entries.only("scoring_func", "sigmoid")
    # Required for models with experts: tools disagree on its default, and no tensor shape tells.
    none, one = (None, None) if experts else (0, 1)
    return Router(
        experts=experts,
        top_k=entries.size("num_experts_per_tok", least=0, default=none),
        score="sigmoid",
        float32_logits=True,
        renormalise=entries.flag("norm_topk_prob", default=True),
        scaling=entries.number("routed_scaling_factor", default=one),
        bias=True,
        groups=entries.size("n_group", default=one),
        top_groups=entries.size("topk_group", default=one),
    )


def deepseek_names(config: ModelConfig) -> CheckpointNames:
    """DeepSeek-V3's tensors."""
    # Older tools saved the RoPE frequencies, which follow from the configuration.
    frequencies = {
        f"{layer}self_attn.rotary_emb.inv_freq": (_mla(config).rope_dim // 2,)
        for layer in [*layer_prefixes(config), *mtp_prefixes(config)]
    }
    return decoder_names(config, _attention_sources, _ffn_sources, optional=frequencies)


def _mla(config: ModelConfig) -> MLA:
    assert isinstance(config.attention, MLA)
    return config.attention


def _attention_sources(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    d, sizes, name = config.d_model, _mla(config), f"{layer}self_attn."
    heads, latent = sizes.q_heads, sizes.kv_latent
    queries, down = heads * (sizes.nope_dim + sizes.rope_dim), latent + sizes.rope_dim
    both = sizes.nope_dim + sizes.v_dim
    low = (sizes.q_latent,) if sizes.q_latent else ()
    downs = (*("q_a_proj" for _ in low), "kv_a_proj_with_mqa")
    kv_b = (f"{name}kv_b_proj.weight",), ((heads * both, latent),)
    sources = {
        "input_norm": vector(f"{layer}input_layernorm.weight", d),
        "attention.down": Source(
            tuple(f"{name}{each}.weight" for each in downs),
            tuple((rows, d) for rows in (*low, down)),
        ),
        "attention.latent_norm": vector(f"{name}kv_a_layernorm.weight", latent),
        "attention.key_up": Source(
            *kv_b, view=View((heads, both, latent), axis=1, start=0, stop=sizes.nope_dim)
        ),
        "attention.value_up": Source(
            *kv_b, view=View((heads, both, latent), axis=1, start=sizes.nope_dim, stop=both)
        ),
        "attention.out": matrix(f"{name}o_proj.weight", d, heads * sizes.v_dim),
        "post_norm": vector(f"{layer}post_attention_layernorm.weight", d),
    }
    if sizes.q_latent:
        sources |= {
            "attention.query_norm": vector(f"{name}q_a_layernorm.weight", sizes.q_latent),
            "attention.query_up": matrix(f"{name}q_b_proj.weight", queries, sizes.q_latent),
        }
    else:
        sources["attention.query_up"] = matrix(f"{name}q_proj.weight", queries, d)
    if sizes.bias:
        sources |= {
            "attention.down_bias": Source(
                tuple(f"{name}{each}.bias" for each in downs),
                tuple((rows,) for rows in (*low, down)),
            ),
            "attention.out_bias": vector(f"{name}o_proj.bias", d),
        }
    if kind == "moe":
        sources |= {
            "router.gate": matrix(f"{layer}mlp.gate.weight", config.experts, d),
            "router.bias": vector(f"{layer}mlp.gate.e_score_correction_bias", config.experts),
        }
    return sources


def _ffn_sources(config: ModelConfig, layer: str, kind: FFNKind) -> Sources:
    if kind == "dense":
        return swiglu("dense", f"{layer}mlp.", config.d_model, config.d_ff)
    sources = per_expert(config, f"{layer}mlp.experts.")
    if config.shared_d_ff:
        shared = f"{layer}mlp.shared_experts."
        sources |= swiglu("dense", shared, config.d_model, config.shared_d_ff)
    return sources

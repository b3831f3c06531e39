"""DeepSeek-V3 and R1, and Kimi K2 and K2.5, which have the same architecture (`model_type`
deepseek_v3, kimi_k2 and kimi_k25): their config.json and their tensors."""

from typing import Any

from jaxserve.checkpoint.entries import Entries, yarn_magnitude
from jaxserve.checkpoint.source import (
    Source,
    Sources,
    View,
    matrix,
    vector,
)
from jaxserve.config.model import MLA, ModelConfig, Rope, Router


def deepseek_config(entries: Entries) -> ModelConfig:
    """DeepSeek-V3's config.json."""
    decoder = entries.decoder()
    rope_dim = entries.size("qk_rope_head_dim")
    rope = entries.rope(
        "qk_rope_head_dim", rope_dim, interleaved=entries.flag("rope_interleave", default=True)
    )
    # Implied by the other attention entries.
    entries.meaningless("num_key_value_heads", "head_dim", "qk_head_dim")
    return ModelConfig(
        **decoder,
        **experts(entries, decoder["layers"]),
        attention=_attention(entries, rope, rope_dim),
        rope=rope,
    )


def experts(entries: Entries, layers: int) -> dict[str, Any]:
    """Reads routed experts, shared expert and prediction modules, as fields of `ModelConfig`."""
    first, every = (
        entries.size("first_k_dense_replace", least=0, default=0),
        entries.size("moe_layer_freq", default=1),
    )
    count = entries.size("n_routed_experts", "num_local_experts", least=0, default=0)
    expert_d_ff = entries.size("moe_intermediate_size", least=0, default=0 if not count else None)
    moe_layers = {layer for layer in range(first, layers) if layer % every == 0 and count}
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    rule = _router(entries, count)
    entries.only("topk_method", "noaux_tc")
    entries.only("mlp_bias", False)
    return {
        "moe_layers": frozenset(moe_layers),
        "router": rule if moe_layers or mtp_layers else None,
        "expert_d_ff": expert_d_ff,
        "shared_d_ff": expert_d_ff * entries.size("n_shared_experts", least=0, default=0),
        "mtp_layers": mtp_layers,
    }


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


def _router(entries: Entries, count: int) -> Router:
    entries.only("scoring_func", "sigmoid")
    # Required for models with experts: tools disagree on its default, and no tensor shape tells.
    none, one = (None, None) if count else (0, 1)
    return Router(
        experts=count,
        top_k=entries.size("num_experts_per_tok", least=0, default=none),
        score="sigmoid",
        float32_logits=True,
        renormalise=entries.flag("norm_topk_prob", default=True),
        scaling=entries.number("routed_scaling_factor", default=one),
        bias=True,
        groups=entries.size("n_group", default=one),
        top_groups=entries.size("topk_group", default=one),
    )


def latent_attention(config: ModelConfig, name: str) -> Sources:
    """The leaves of latent attention; `name` is the prefix of its tensors."""
    d, sizes = config.d_model, config.attention
    assert isinstance(sizes, MLA)
    heads, latent = sizes.q_heads, sizes.kv_latent
    queries, down = heads * (sizes.nope_dim + sizes.rope_dim), latent + sizes.rope_dim
    both = sizes.nope_dim + sizes.v_dim
    low = (sizes.q_latent,) if sizes.q_latent else ()
    downs = (*("q_a_proj" for _ in low), "kv_a_proj_with_mqa")
    kv_b = (f"{name}kv_b_proj.weight",), ((heads * both, latent),)
    sources = {
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
    return sources

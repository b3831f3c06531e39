"""DeepSeek-V3 and R1, and Kimi K2 and K2.5, which have the same architecture (`model_type`
deepseek_v3, kimi_k2 and kimi_k25): their config.json and their tensors."""

import functools
from typing import Any

from jaxserve.checkpoint import source
from jaxserve.checkpoint.entries import Entries, yarn_magnitude
from jaxserve.checkpoint.families import Family
from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import FFN, Attention, LayerKind, ModelConfig, Rope, RouterSpec


def deepseek_config(entries: Entries) -> ModelConfig:
    """Reads DeepSeek-V3's config.json."""
    decoder = entries.decoder()
    layers, dense = decoder.pop("layers"), FFN(d_ff=decoder.pop("d_ff"))
    rope_dim = entries.size("qk_rope_head_dim")
    interleaved = entries.flag("rope_interleave", default=True)
    rope = entries.rope("qk_rope_head_dim", rope_dim, interleaved=interleaved)
    # Implied by the other attention entries.
    entries.meaningless("num_key_value_heads", "head_dim", "qk_head_dim")
    attention = _attention(entries, rope, rope_dim)
    return ModelConfig(**decoder, **all_layers(entries, attention, layers, dense))


def all_layers(entries: Entries, attention: Attention, layers: int, dense: FFN) -> dict[str, Any]:
    """Reads the FFN with routed experts and a shared one, the layers that have it, and the number
    of prediction modules. Returns all layers as fields of `ModelConfig`."""
    first = entries.size("first_k_dense_replace", least=0, default=0)
    every = entries.size("moe_layer_freq", default=1)
    count = entries.size("n_routed_experts", "num_local_experts", least=0, default=0)
    expert_d_ff = entries.size("moe_intermediate_size", least=0, default=0 if not count else None)
    moe_layers = {layer for layer in range(first, layers) if layer % every == 0 and count}
    mtp_layers = entries.size("num_nextn_predict_layers", least=0, default=0)
    rule = _router(entries, count)
    entries.only("topk_method", "noaux_tc")
    entries.only("mlp_bias", False)
    shared = expert_d_ff * entries.size("n_shared_experts", least=0, default=0)
    moe = FFN(d_ff=shared, router=rule, expert_d_ff=expert_d_ff)
    ffns = (moe if layer in moe_layers else dense for layer in range(layers))
    return {
        "decoder": tuple(LayerKind(attention, ffn) for ffn in ffns),
        "predictors": (LayerKind(attention, moe),) * mtp_layers,
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
        rope=rope,
        bias=entries.flag("attention_bias"),
    )


def _router(entries: Entries, count: int) -> RouterSpec:
    entries.only("scoring_func", "sigmoid")
    # Required for models with experts: tools disagree on its default, and no tensor shape tells.
    none, one = (None, None) if count else (0, 1)
    return RouterSpec(
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


def latent_attention(config: ModelConfig, sizes: Attention, name: str) -> source.Sources:
    """The leaves of latent attention; `name` is the prefix of its tensors."""
    d = config.d_model
    assert isinstance(sizes, MLA)
    heads, latent = sizes.q_heads, sizes.kv_latent
    queries, down = heads * (sizes.nope_dim + sizes.rope_dim), latent + sizes.rope_dim
    both = sizes.nope_dim + sizes.v_dim
    downs = {"q_a_proj": sizes.q_latent} if sizes.q_latent else {}
    downs |= {"kv_a_proj_with_mqa": down}
    kv_b = source.matrix(f"{name}kv_b_proj.weight", heads * both, latent)
    part = functools.partial(source.View, (heads, both, latent), 1)
    sources = {
        "attention.down": source.matrices(name, downs, d),
        "attention.latent_norm": source.vector(f"{name}kv_a_layernorm.weight", latent),
        "attention.key_up": kv_b._replace(view=part(0, sizes.nope_dim)),
        "attention.value_up": kv_b._replace(view=part(sizes.nope_dim, both)),
        "attention.out": source.matrix(f"{name}o_proj.weight", d, heads * sizes.v_dim),
    }
    if sizes.q_latent:
        sources |= {
            "attention.query_norm": source.vector(f"{name}q_a_layernorm.weight", sizes.q_latent),
            "attention.query_up": source.matrix(f"{name}q_b_proj.weight", queries, sizes.q_latent),
        }
    else:
        sources["attention.query_up"] = source.matrix(f"{name}q_proj.weight", queries, d)
    if sizes.bias:
        sources |= {
            "attention.down_bias": source.Source(
                tuple(f"{name}{each}.bias" for each in downs),
                tuple((rows,) for rows in downs.values()),
            ),
            "attention.out_bias": source.vector(f"{name}o_proj.bias", d),
        }
    return sources


_NAMES = functools.partial(source.decoder_names, attention=latent_attention)
_OTHER_PARTS = "vision_tower.", "mm_projector."
DEEPSEEK = Family(deepseek_config, _NAMES)
KIMI_K25 = Family(
    deepseek_config, functools.partial(_NAMES, outer="language_model.", ignored=_OTHER_PARTS)
)

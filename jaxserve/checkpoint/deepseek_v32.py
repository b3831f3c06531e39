"""DeepSeek-V3.2 and GLM-5 (`model_type` deepseek_v32 and glm_moe_dsa): DeepSeek-V3 with an indexer
in every layer, those of prediction modules included; from GLM-5.2 on layers share them. Their
config.json and their tensors."""

import functools
from collections.abc import Collection

import msgspec

from jaxserve.checkpoint.deepseek import deepseek_config, latent_attention
from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import Sources, decoder_names, matrix, vector
from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import Attention, Indexer, ModelConfig


def deepseek_v32_config(
    entries: Entries, *, interleaved: bool = False, shared: Collection[int] = ()
) -> ModelConfig:
    """Reads DeepSeek-V3.2's config.json.

    Args:
      interleaved: whether the family's indexer rotates neighbours, unless the file says otherwise.
      shared: layers that share the indexer of a layer before them.
    """
    config = deepseek_config(entries)
    entries.only("layer_types", None, ["indexed_attention"] * config.layers)
    ffns = ["sparse" if kind.ffn.router else "dense" for kind in config.decoder]
    entries.only("mlp_layer_types", None, ffns)
    indexer = Indexer(
        heads=entries.size("index_n_heads"),
        head_dim=entries.size("index_head_dim"),
        top_k=entries.size("index_topk"),
        interleaved=entries.flag("indexer_rope_interleave", default=interleaved),
    )
    spec, replace = config.layer(0).attention, msgspec.structs.replace
    assert isinstance(spec, MLA)
    kinds = [
        kind._replace(attention=replace(spec, indexer=replace(indexer, shared=layer in shared)))
        for layer, kind in enumerate(config.decoder + config.predictors)
    ]
    decoder, predictors = tuple(kinds[: config.layers]), tuple(kinds[config.layers :])
    if not spec.q_latent or spec.rope_dim > indexer.head_dim:
        entries.problems.append(
            f"index_head_dim = {indexer.head_dim} with q_lora_rank = {spec.q_latent} and "
            f"qk_rope_head_dim = {spec.rope_dim}: an indexer needs query latents, and rotates "
            "qk_rope_head_dim of its columns"
        )
    return replace(config, decoder=decoder, predictors=predictors)


def glm_moe_dsa_config(entries: Entries) -> ModelConfig:
    """Reads the config.json of GLM-5, and of GLM-5.2, whose layers share indexers (IndexShare,
    arXiv 2603.12201). A prediction module that runs several times chooses anew in every pass."""
    layers, every = entries.size("num_hidden_layers"), entries.size("index_topk_freq", default=1)
    first = entries.size("index_skip_topk_offset", default=2) - 1
    rule = ["FS"[max(layer - first, 0) % every > 0] for layer in range(layers)]
    kinds = entries.names("indexer_types") or [*(entries.any("index_topk_pattern") or rule)]
    shared = {layer for layer, kind in enumerate(kinds) if kind in ("shared", "S")}
    if len(kinds) != layers or 0 in shared or not {*kinds} <= {"full", "shared", "F", "S"}:
        said = f"indexer_types = {kinds}: needs {layers} entries, full or shared, the first full"
        entries.problems.append(said)
    config = deepseek_v32_config(entries, interleaved=True, shared=shared)
    entries.meaningless("index_share_for_mtp_iteration")
    entries.only("moe_router_dtype", "float32")
    return config


def indexed_attention(config: ModelConfig, sizes: Attention, name: str) -> Sources:
    """The leaves of latent attention with an indexer; `name` is the prefix of its tensors."""
    assert isinstance(sizes, MLA)
    assert sizes.indexer
    if sizes.indexer.shared:
        return latent_attention(config, sizes, name)
    heads, width, d = sizes.indexer.heads, sizes.indexer.head_dim, config.d_model
    leaf, tensor = "attention.indexer.", f"{name}indexer."
    return latent_attention(config, sizes, name) | {
        f"{leaf}query": matrix(f"{tensor}wq_b.weight", heads * width, sizes.q_latent),
        f"{leaf}key": matrix(f"{tensor}wk.weight", width, d),
        f"{leaf}key_norm": vector(f"{tensor}k_norm.weight", width),
        f"{leaf}key_bias": vector(f"{tensor}k_norm.bias", width),
        f"{leaf}weights": matrix(f"{tensor}weights_proj.weight", heads, d),
    }


_NAMES = functools.partial(decoder_names, attention=indexed_attention)
DEEPSEEK_V32 = Family(deepseek_v32_config, _NAMES)
GLM_MOE_DSA = Family(glm_moe_dsa_config, _NAMES)

"""Qwen3-Next (`model_type` qwen3_next): its config.json and its tensors."""

import re

from jaxserve.checkpoint import source
from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.config import model
from jaxserve.config.attention.gated_delta import DeltaNet
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import Attention

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next_config(entries: Entries) -> model.ModelConfig:
    """Reads Qwen3-Next's config.json."""
    decoder = entries.decoder("moe_intermediate_size")
    layers, d_ff = decoder.pop("layers"), decoder.pop("d_ff")
    heads = entries.heads(decoder["d_model"], 256)
    share = entries.number("partial_rotary_factor", default=0.25)
    rope = entries.rope("head_dim", heads["head_dim"], share=share)
    full = GQA(**heads, rope=rope, qk_norm="heads", gate="columns")
    linear = _linear(entries)
    ffn = model.FFN(
        d_ff=entries.size("shared_expert_intermediate_size"),
        gated=True,
        expert_d_ff=d_ff,
        router=model.RouterSpec(
            experts=entries.size("num_experts"),
            top_k=entries.size("num_experts_per_tok"),
            renormalise=entries.flag("norm_topk_prob", default=True),
        ),
    )
    entries.only("mlp_only_layers", [])
    entries.only("decoder_sparse_step", 1)
    entries.only("attention_bias", False)
    entries.only("attn_output_gate", True)
    entries.only("mtp_use_dedicated_embeddings", False)
    # Qwen3-Next has a module and does not say so.
    names = "num_nextn_predict_layers", "mtp_num_hidden_layers"
    modules = entries.size(*names, least=0, default=1)
    if modules > 1:
        entries.problems.append(f"{modules} modules of multi-token prediction, not 0 or 1")
    # No layer is dense, and states are FP32.
    entries.meaningless("intermediate_size", "mamba_ssm_dtype")
    kinds = [full if name == FULL else linear for name in _types(entries, layers)]
    layer_kinds = tuple(model.LayerKind(kind, ffn) for kind in kinds)
    predictors = (model.LayerKind(full, ffn),) * modules
    return model.ModelConfig(**decoder, decoder=layer_kinds, predictors=predictors, unit_norms=True)


def _linear(entries: Entries) -> DeltaNet:
    keys, values = "linear_num_key_heads", "linear_num_value_heads"
    spec = DeltaNet(
        kv_heads=entries.size(keys),
        q_heads=entries.size(values),
        head_dim=entries.size("linear_key_head_dim"),
        value_dim=entries.size("linear_value_head_dim"),
        convolution=entries.size("linear_conv_kernel_dim", least=2),
    )
    entries.multiple(values, spec.q_heads, keys, spec.kv_heads)
    return spec


def _types(entries: Entries, layers: int) -> list[str]:
    """Reads the type of every layer: named, or every few layers one that sees all tokens."""
    every = entries.size("full_attention_interval", default=4)
    by_number = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    types = entries.names("layer_types") or by_number
    if len(types) != layers or not {*types} <= {LINEAR, FULL}:
        said = f"layer_types = {types!r} is not {LINEAR} or {FULL} for each of {layers} layers"
        entries.problems.append(said)
    return types


MODULE = {
    "layers.0": "",
    "pre_fc_norm_embedding": "enorm.",
    "pre_fc_norm_hidden": "hnorm.",
    "fc": "eh_proj.",
    "norm": "shared_head.norm.",
}
"""Prefixes in a prediction module, which is no layer in the files, and as other families have them
in the layer behind the model's own."""


def qwen3_next_names(config: model.ModelConfig) -> source.CheckpointNames:
    """Qwen3-Next's tensors."""
    names = source.decoder_names(config, mixing, feed_forward)
    return names._replace(spellings=module_spellings(config))


def module_spellings(config: model.ModelConfig) -> tuple[tuple[str, str], ...]:
    """Returns the spellings (`CheckpointNames`) of the prediction module's tensors."""
    layer = f"model.layers.{config.layers}."
    return tuple((rf"^mtp\.{re.escape(own)}\.", layer + known) for own, known in MODULE.items())


def mixing(config: model.ModelConfig, sizes: Attention, name: str) -> source.Sources:
    """Leaves of a layer's attention; `name` is their prefix where all tokens are seen."""
    if not isinstance(sizes, DeltaNet):
        return source.grouped_query(config, sizes, name)
    d, name = config.d_model, f"{name.removesuffix('self_attn.')}linear_attn."
    keys, values = sizes.kv_heads * sizes.head_dim, sizes.q_heads * sizes.value_dim
    columns, taps = 2 * keys + values, sizes.convolution

    def part(start: int, stop: int) -> source.Source:
        whole = source.Source((f"{name}conv1d.weight",), ((columns, 1, taps),))
        return whole._replace(view=source.View((columns, taps), 0, start, stop))

    return {
        "attention.mix": source.matrix(f"{name}in_proj_qkvz.weight", columns + values, d),
        "attention.rates": source.matrix(f"{name}in_proj_ba.weight", 2 * sizes.q_heads, d),
        "attention.query_taps": part(0, keys),
        "attention.key_taps": part(keys, 2 * keys),
        "attention.value_taps": part(2 * keys, columns),
        "attention.decay": source.vector(f"{name}A_log", sizes.q_heads),
        "attention.step_bias": source.vector(f"{name}dt_bias", sizes.q_heads),
        "attention.norm": source.vector(f"{name}norm.weight", sizes.value_dim),
        "attention.out": source.matrix(f"{name}out_proj.weight", d, values),
    }


def feed_forward(config: model.ModelConfig, layer: str, ffn: model.FFN) -> source.Sources:
    """The leaves of a layer's experts, of the shared one and of its gate."""
    return {
        **source.per_expert(config, ffn, f"{layer}mlp.experts."),
        **source.swiglu("dense", f"{layer}mlp.shared_expert.", config.d_model, ffn.d_ff),
        "dense.share": source.matrix(f"{layer}mlp.shared_expert_gate.weight", 1, config.d_model),
    }


QWEN3_NEXT = Family(qwen3_next_config, qwen3_next_names, "num_experts")

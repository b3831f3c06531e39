"""gpt-oss 20b and 120b (`model_type` gpt_oss): their config.json and their tensors."""

import functools

import msgspec

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import Source, Sources, View, decoder_names
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, LayerKind, ModelConfig, RouterSpec
from pallas_kernels.activation import Activation

WINDOWED, FULL = "sliding_attention", "full_attention"


def gpt_oss_config(entries: Entries) -> ModelConfig:
    """gpt-oss's config.json."""
    decoder = entries.decoder()
    layers, expert_d_ff = decoder.pop("layers"), decoder.pop("d_ff")
    heads, bias = entries.heads(decoder["d_model"]), entries.flag("attention_bias", default=True)
    rope = entries.rope("head_dim", heads["head_dim"])
    full = GQA(**heads, rope=rope, qkv_bias=bias, out_bias=bias, sinks=True)
    windowed = msgspec.structs.replace(full, window=entries.size("sliding_window"))
    types = entries.names("layer_types") or [(WINDOWED, FULL)[n % 2] for n in range(layers)]
    if len(types) != layers or not {*types} <= {WINDOWED, FULL}:
        said = f"layer_types needs {layers} entries, each {WINDOWED} or {FULL}"
        entries.problems.append(said)
    top_k = entries.size("num_experts_per_tok")
    entries.only("experts_per_token", top_k)
    entries.meaningless("initial_context_length")  # repeats original_max_position_embeddings
    rule = RouterSpec(
        experts=entries.size("num_local_experts"), top_k=top_k, renormalise=True, logit_bias=True
    )
    activation = Activation(
        limit=entries.number("swiglu_limit", default=7.0),
        clamp="before",
        alpha=entries.number("swiglu_alpha", default=1.702),
        plus=1.0,
    )
    moe = FFN(router=rule, expert_d_ff=expert_d_ff, expert_activation=activation, expert_bias=True)
    kinds = (LayerKind(windowed if kind == WINDOWED else full, moe) for kind in types)
    return ModelConfig(**decoder, decoder=tuple(kinds))


def _experts(config: ModelConfig, layer: str, ffn: FFN) -> Sources:
    experts, d_ff, d = config.experts, ffn.expert_d_ff, config.d_model
    name = f"{layer}mlp.experts."
    both = Source((f"{name}gate_up_proj",), ((experts, 2 * d_ff, d),), expert_stack=True)
    pairs = experts, d_ff, 2 * d  # rows of gate and up take turns: side by side, they are a row
    return {
        "experts.gate": both._replace(view=View(pairs, 2, 0, d)),
        "experts.up": both._replace(view=View(pairs, 2, d, 2 * d)),
        "experts.down": Source((f"{name}down_proj",), ((experts, d, d_ff),), expert_stack=True),
        "experts.bias": Source((f"{name}gate_up_proj_bias",), ((experts, 2 * d_ff),)),
        "experts.down_bias": Source((f"{name}down_proj_bias",), ((experts, d),)),
    }


_names = functools.partial(decoder_names, ffn=_experts, gate="mlp.router")
GPT_OSS = Family(gpt_oss_config, _names, "num_local_experts")

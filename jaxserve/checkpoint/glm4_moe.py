"""GLM-4.5, 4.6, 4.7 and their Air models (`model_type` glm4_moe): their config.json. The entries of
experts are DeepSeek-V3's."""

from jaxserve.checkpoint.deepseek import all_layers
from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import decoder_names
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, ModelConfig


def glm4_moe_config(entries: Entries) -> ModelConfig:
    """GLM-4.5's config.json."""
    decoder = entries.decoder()
    layers, dense = decoder.pop("layers"), FFN(d_ff=decoder.pop("d_ff"))
    heads = entries.heads(decoder["d_model"])
    share = entries.number("partial_rotary_factor", default=0.5)
    norm, bias = entries.flag("use_qk_norm"), entries.flag("attention_bias")
    rope = entries.rope("head_dim", heads["head_dim"], share=share)
    attention = GQA(**heads, rope=rope, qk_norm="heads" if norm else "none", qkv_bias=bias)
    return ModelConfig(**decoder, **all_layers(entries, attention, layers, dense))


GLM4_MOE = Family(glm4_moe_config, decoder_names)

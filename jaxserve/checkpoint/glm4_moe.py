"""GLM-4.5, 4.6, 4.7 and their Air models (`model_type` glm4_moe): their config.json. The entries of
experts are DeepSeek-V3's."""

from jaxserve.checkpoint.deepseek import experts
from jaxserve.checkpoint.entries import Entries
from jaxserve.config.model import GQA, ModelConfig


def glm4_moe_config(entries: Entries) -> ModelConfig:
    """GLM-4.5's config.json."""
    decoder = entries.decoder()
    heads = entries.heads(decoder["d_model"])
    share = entries.number("partial_rotary_factor", default=0.5)
    norm, bias = entries.flag("use_qk_norm"), entries.flag("attention_bias")
    return ModelConfig(
        **decoder,
        **experts(entries, decoder["layers"]),
        attention=GQA(**heads, qk_norm="heads" if norm else "none", qkv_bias=bias),
        rope=entries.rope("head_dim", heads["head_dim"], share=share),
    )

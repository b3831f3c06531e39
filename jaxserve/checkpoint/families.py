"""The model families, by `model_type` of config.json. A family is data: a reader of its config and
the names of its tensors.

A process imports the file of its own model's family only.
"""

import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.quantization_config import stored_format, text_part
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.model import ModelConfig


class Family(NamedTuple):
    """How to read one family."""

    config: Callable[[Entries], ModelConfig]
    """Reads the entries of the text model; problems stay in them."""
    names: Callable[[ModelConfig], CheckpointNames]
    experts: str = "n_routed_experts"
    """Name of the entry with the number of routed experts, for messages; so are the others."""
    top_k: str = "num_experts_per_tok"
    kv_heads: str = "num_key_value_heads"


FAMILIES = {
    "step3_vl": "step3:STEP3",
    "step3_text": "step3:STEP3",
    "step3p5": "step3p5:STEP3P5",
    "step3p7": "step3p5:STEP3P5",
    "deepseek_v3": "deepseek:DEEPSEEK",
    "kimi_k2": "deepseek:DEEPSEEK",
    "kimi_k25": "deepseek:KIMI_K25",
    "deepseek_v32": "deepseek_v32:DEEPSEEK_V32",
    "deepseek_v4": "deepseek_v4:DEEPSEEK_V4",
    "glm_moe_dsa": "deepseek_v32:GLM_MOE_DSA",
    "glm4_moe": "glm4_moe:GLM4_MOE",
    "gpt_oss": "gpt_oss:GPT_OSS",
    "minimax_m2": "minimax_m2:MINIMAX_M2",
    "qwen3": "qwen3:QWEN3",
    "qwen3_next": "qwen3_next:QWEN3_NEXT",
    "qwen3_5_moe": "qwen3_5:QWEN3_5",
    "qwen3_5_moe_text": "qwen3_5:QWEN3_5",
    "qwen3_moe": "qwen3:QWEN3",
}
"""File in this folder, and name in it, of each known `model_type`'s `Family`."""


def family_of(model_type: str) -> Family:
    """The family of a known `model_type`."""
    return cast(Family, pkgutil.resolve_name(f"jaxserve.checkpoint.{FAMILIES[model_type]}"))


def architecture(tree: Mapping[str, Any], ignored: Collection[str] = ()) -> ModelConfig:
    """The architecture in a config.json of a known family.

    Args:
      ignored: entries that the user declares irrelevant.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    entries, family = Entries(text_part(tree), ignored), family_of(tree["model_type"])
    config = family.config(entries)
    stored = stored_format(entries)
    entries.only("hidden_act", "silu")
    if not entries.problems:
        for each in config.attentions():
            entries.multiple("num_attention_heads", each.q_heads, family.kv_heads, each.kv_heads)
        if config.moe.router:
            entries.router(config.moe.router, family.experts, family.top_k)
    entries.refuse_unread()
    entries.raise_problems()
    # A family may know better which format most weights have.
    return msgspec.structs.replace(config, stored=stored) if config.stored == "plain" else config

"""The model families, by `model_type` of config.json. A family is data: a reader of its config and
the names of its tensors."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from jaxserve.checkpoint.deepseek import deepseek_config, latent_attention
from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.glm4_moe import glm4_moe_config
from jaxserve.checkpoint.minimax_m2 import minimax_m2_config, minimax_m2_names
from jaxserve.checkpoint.quantization_config import stored_format, text_part
from jaxserve.checkpoint.qwen3 import qwen3_config
from jaxserve.checkpoint.source import CheckpointNames, decoder_names
from jaxserve.checkpoint.step3 import step3_config, step3_names
from jaxserve.checkpoint.step3p5 import step3p5_config, step3p5_names
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


_STEP3 = Family(step3_config, step3_names, "moe_num_experts", "moe_top_k", "num_attention_groups")
_STEP3P5 = Family(step3p5_config, step3p5_names, *_STEP3[2:])
_LATENT = functools.partial(decoder_names, attention=latent_attention)
_DEEPSEEK = Family(deepseek_config, _LATENT)
_QWEN3 = Family(qwen3_config, decoder_names, "num_experts")
_K25 = {"outer": "language_model.", "ignored": ("vision_tower.", "mm_projector.")}

FAMILIES: dict[str, Family] = {
    "step3_vl": _STEP3,
    "step3_text": _STEP3,
    "step3p5": _STEP3P5,
    "step3p7": _STEP3P5,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "kimi_k25": Family(deepseek_config, functools.partial(_LATENT, **_K25)),
    "glm4_moe": Family(glm4_moe_config, decoder_names),
    "minimax_m2": Family(minimax_m2_config, minimax_m2_names, "num_local_experts"),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
}


def architecture(tree: Mapping[str, Any], ignored: Collection[str] = ()) -> ModelConfig:
    """The architecture in a config.json of a known family.

    Args:
      ignored: entries that the user declares irrelevant.

    Raises:
      CheckpointError: with every entry that is missing, of a wrong type, or not supported.
    """
    entries, family = Entries(text_part(tree), ignored), FAMILIES[tree["model_type"]]
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
    return msgspec.structs.replace(config, stored=stored)

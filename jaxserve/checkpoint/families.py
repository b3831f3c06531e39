"""The model families, by `model_type` of config.json. A family is data: a reader of its config and
the names of its tensors."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxserve.checkpoint.deepseek import deepseek_config, deepseek_names
from jaxserve.checkpoint.qwen3 import qwen3_config, qwen3_names
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.step3 import step3_config, step3_names
from jaxserve.config.model import ModelConfig


class Family(NamedTuple):
    """How to read one family."""

    config: Callable[[Mapping[str, Any], Collection[str]], ModelConfig]
    """Called with the entries of config.json and the names that the user declares irrelevant."""
    names: Callable[[ModelConfig], CheckpointNames]


_STEP3 = Family(step3_config, step3_names)
_DEEPSEEK = Family(deepseek_config, deepseek_names)
_QWEN3 = Family(qwen3_config, qwen3_names)

FAMILIES: dict[str, Family] = {
    "step3_vl": _STEP3,
    "step3_text": _STEP3,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
}

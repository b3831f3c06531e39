"""DeepSeek-V3 and Kimi K2; `test_families.py` has what all families share."""

import pytest

from jaxserve.checkpoint.families import architecture, family_of
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.shipped import CONFIGS
from tests.reference.tiny_sizes import TinyDeepseek

TREE = TinyDeepseek().config()


def test_scales():
    """DeepSeek-V3's and Kimi K2's, as published by those who ran them."""
    for name, scale in (("deepseek-v3", 0.135234), ("kimi-k2", 0.130861)):
        config, _ = read_config(CONFIGS / "models" / name)
        assert config.layer(0).attention.scale == pytest.approx(scale, abs=1e-6)


def test_keys_and_values_are_parts_of_one_tensor():
    """kv_b_proj holds, head by head, the rows of W^UK (16) and of W^UV (12)."""
    attention = family_of("deepseek_v3").names(architecture(TREE)).attention[0]
    key, value = attention["attention.key_up"], attention["attention.value_up"]
    assert key.names == value.names == ("model.layers.0.self_attn.kv_b_proj.weight",)
    assert key.shapes == value.shapes == ((4 * 28, 32),)
    assert key.view == ((4, 28, 32), 1, 0, 16)
    assert value.view == ((4, 28, 32), 1, 16, 28)

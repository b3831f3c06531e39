"""What an open key gets where nothing but the hardware decides it."""

import pytest

from jaxserve.config.auto import page_tokens


@pytest.mark.parametrize(
    ("platform", "cache_format", "tokens"),
    [
        ("cpu", "int8", 16),
        ("gpu", "bfloat16", 64),
        ("gpu", "fp8", 64),
        ("tpu", "bfloat16", 128),
        ("tpu", "int8", 256),
        ("tpu", "fp8", 256),
    ],
)
def test_page_tokens(platform, cache_format, tokens):
    assert page_tokens(platform, cache_format) == tokens

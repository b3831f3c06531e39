"""Values of open keys that the hardware alone decides."""

import pytest

from jaxserve.config.auto import page_tokens

TOKENS = {
    "cpu": [16, 16, 16, 96, 128],
    "gpu": [64, 64, 64, 96, 128],
    "tpu": [128, 256, 256, 192, 512],
}


@pytest.mark.parametrize("platform", TOKENS)
def test_page_tokens(platform):
    found = [page_tokens(platform, cache) for cache in ("bfloat16", "int8", "fp8")]
    found += [page_tokens(platform, "bfloat16", unit=96), page_tokens(platform, "fp8", unit=128)]
    assert found == TOKENS[platform]

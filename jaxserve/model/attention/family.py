"""Which module computes a model's attention. Called by `model.py`; each family has its own file."""

from jaxserve.config.model import GQA, MFA, ModelConfig
from jaxserve.model.attention import gqa, mfa, mla
from jaxserve.model.module import Formats, Rngs


def attention_module(
    config: ModelConfig, window: int, formats: Formats, rngs: Rngs
) -> mfa.MFA | gqa.GQA | mla.MLA:
    """The attention module of a layer: normed tokens, pages and batch in; this device's share of
    the output, and the pages, out.

    Args:
      window: tokens that a token attends to; 0: all before it.
    """
    sizes = config.attention
    if isinstance(sizes, MFA):
        return mfa.MFA(config, sizes, window, formats, rngs)
    if isinstance(sizes, GQA):
        return gqa.GQA(config, sizes, window, formats, rngs)
    return mla.MLA(config, sizes, window, formats, rngs)

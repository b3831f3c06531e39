"""When prompts of latent attention run on expanded keys and values: plain Python.

Called by `mla.py` and by the planner.
"""

import math

from jaxserve.config.model import MLA


def least_expanded(sizes: MLA) -> float:
    """Returns the tokens of a chunk from which on it attends to expanded keys and values: twice the
    number at which both forms take the same FLOPs; infinity: the absorbed form never takes more.

    For each head, to expand a position takes kv_latent · (nope_dim + v_dim) multiplications, once a
    chunk. A pair of tokens then takes nope_dim + rope_dim + v_dim of them; absorbed it takes
    2 · kv_latent + rope_dim. For DeepSeek-V3 the result is 342.
    """
    width = sizes.nope_dim + sizes.v_dim
    saved = 2 * sizes.kv_latent - width
    return math.ceil(2 * sizes.kv_latent * width / saved) if saved > 0 else math.inf

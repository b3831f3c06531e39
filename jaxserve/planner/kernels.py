"""What kernels multiply: attention's products, their padding, and the rows of the busiest experts.

Called by `stages.py` and `stage_times.py`; knows neither rates nor deployments.
"""

import functools
import math
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import AttentionLayers


def core_flops(group: AttentionLayers) -> float:
    """FLOPs of a query's token with a token that it attends to, all heads: q·k and p·v. Latent
    attention mixes the latent alone, without its positional part."""
    if group.kind == "lightning":
        return 10.0 * group.q_heads * group.head_dim**2
    mixed = group.kv_latent if group.kind == "mla" else group.head_dim
    return 2.0 * group.q_heads * (group.head_dim + mixed)


def tile_padding(group: AttentionLayers, hardware: Hardware, tp: int, rows: Any) -> Any:
    """Rows that an attention kernel multiplies over those that there are: a KV head's query heads
    and a sequence's tokens, padded to the products' smallest tile.

    Args:
      rows: tokens of a sequence in the step, a number or an array.
    """
    heads = group.q_heads / tp / max(1.0, group.kv_heads / tp)
    if group.kind == "lightning":
        heads = float(hardware.tile_rows)
    ceil = np.ceil if isinstance(rows, np.ndarray) else math.ceil
    return ceil(heads * rows / hardware.tile_rows) * hardware.tile_rows / (heads * rows)


def busiest_by_chance(ranks: int, rows: float) -> float:
    """Rows of the busiest of equally popular ranks over the mean of `rows`: the expected largest of
    so many normal draws (Blom 1958) of a Poisson's spread."""
    return min(float(ranks), 1 + _largest(ranks) / max(rows, 1e-9) ** 0.5)


@functools.cache
def _largest(draws: int) -> float:
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))

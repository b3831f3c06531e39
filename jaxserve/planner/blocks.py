"""The blocks that plain XLA computes in where there is no kernel, and how many of them work takes.

Called by `stages.py` and `stage_times.py`. The kernels' own tiles are in `kernels.py`.
"""

import functools
import math

import numpy as np

BLOCK_TOKENS, FIRST_TOKENS = 128, 32
"""Positions of a context that hardware without kernels attends to at a time, and of the first
`BLOCK_TOKENS` (`pallas_kernels/attention/reference.py`)."""

BLOCK_ROWS = 8
"""Rows of one expert that CPUs multiply at a time by weights in 8 or 4 bits; float weights are read
once a group, for one row after the other (`pallas_kernels/grouped_matmul/reference.py`)."""


@functools.lru_cache(4096)
def blocks_met(tokens: int, share: float) -> float:
    """Mean number of blocks of `BLOCK_ROWS` rows that an expert has of so many tokens, each of
    which chooses it with this probability: Σ P(rows > 8 j)."""
    if share >= 1:
        return float(-(-tokens // BLOCK_ROWS))
    rows = np.arange(tokens + 1)
    steps = np.log((tokens - rows[:-1]) / (rows[:-1] + 1)) + math.log(share / (1 - share))
    logs = tokens * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)])
    above = 1 - np.cumsum(np.exp(logs))
    return float(np.sum(above[:tokens:BLOCK_ROWS]))

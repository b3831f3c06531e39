"""Work of kernels beyond its plain count: padding of attention's rows, prompts of latent attention,
rows of the busiest experts, and the blocks in which plain XLA computes without kernels.

Called by `stages.py` and `stage_times.py`; knows neither rates nor deployments.
"""

import functools
import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxserve.planner.models import AttentionLayers

BLOCK_TOKENS, FIRST_TOKENS = 128, 32
"""Positions of a context that hardware without kernels attends to at a time, and of the first
`BLOCK_TOKENS` (`pallas_kernels/attention/reference.py`)."""
BLOCK_ROWS = 8
"""Rows of one expert that CPUs multiply at a time by weights in 8 or 4 bits; float weights are read
once a group, for one row after the other (`pallas_kernels/grouped_matmul/reference.py`)."""


class Expanded(NamedTuple):
    """The part of latent attention that runs on expanded keys and values instead of the latents
    (DeepSeek-V2 §2.1); numbers or arrays, an entry a sequence."""

    pairs: Any
    """Pairs of a query's token with a token that it attends to."""
    tokens: Any
    """Tokens whose keys and values are expanded, written, and read again."""
    again: Any
    """Tokens for which the maps are charged in addition to their pass as linear maps."""


class Attending(NamedTuple):
    """A layer's attention in a step: numbers, or arrays with an entry for each DP group."""

    tokens: Any
    """Rows of the batch."""
    read: Any
    """Cached tokens that are read; of lightning attention, states read and written."""
    pairs: Any
    """Pairs of a query's token with a token that it attends to, times `tile_padding`."""
    expanded: Expanded | None = None
    """The part on expanded keys and values; its pairs times `row_padding`."""
    scored: tuple[Any, ...] = (0, 0)
    """Keys that an indexer reads, and pairs that it scores."""

    def of(self, count: int) -> "Attending":
        """Returns the work of `count` such groups, of one DP group, as numbers."""

        def number(each: np.ndarray) -> float:
            return count * float(each[0])

        expanded = self.expanded and Expanded(*map(number, self.expanded))
        tokens, read, pairs = map(number, self[:3])
        return Attending(tokens, read, pairs, expanded, tuple(map(number, self.scored)))


def prompt_chunks(
    tokens: np.ndarray, length: np.ndarray, pairs: np.ndarray, *, least: float
) -> tuple[Any, Any, Expanded]:
    """Latent attention of prompts' chunks: (tokens read from the cache, pairs in absorbed form, the
    expanded part). A sequence with one token decodes, in absorbed form.

    Args:
      tokens: tokens of each sequence in the step.
      length: cached tokens of each sequence after the step.
      pairs: attended pairs of each sequence.
      least: tokens of a chunk from which on it runs on expanded keys and values alone, those cached
        before it included; others run absorbed. 0: every chunk expands within itself and absorbs
        before it, which passes the maps twice.
    """
    chunk = tokens >= (least or 2)
    read = np.where(chunk, length - tokens, length)
    if least:
        own, before = np.where(chunk, length, 0.0), np.where(chunk, read, 0.0)
        return read, np.where(chunk, 0.0, pairs), Expanded(pairs * chunk, own, before)
    inside = np.where(chunk, np.minimum(pairs, tokens * (tokens + 1) / 2), 0.0)
    own = np.where(chunk, tokens, 0.0)
    return read, pairs - inside, Expanded(inside, own, own)


def tile_padding(group: AttentionLayers, tile: int, tp: int, rows: Any) -> Any:
    """Ratio of the rows that an attention kernel multiplies to its actual rows: a KV head's query
    heads times a sequence's tokens, padded to the products' smallest tile.

    Args:
      tile: rows of that tile (`Hardware.tile_rows`).
      rows: tokens of a sequence in the step, a number or an array.
    """
    spec = group.spec
    heads = spec.q_heads / tp / max(1.0, spec.kv_heads / tp)
    return row_padding(tile, (tile if group.has_state else heads) * rows)


def row_padding(tile: int, rows: Any) -> Any:
    """Ratio of padded rows to `rows`, a number or an array. On expanded keys, of which every query
    head has its own, rows are tokens."""
    return np.ceil(rows / tile) * tile / rows


def busiest_by_chance(ranks: int, rows: float) -> float:
    """Rows of the busiest of equally popular ranks over the mean of `rows`, whose spread is a
    Poisson's."""
    return min(float(ranks), 1 + largest_normal(ranks) / max(rows, 1e-9) ** 0.5)


@functools.cache
def largest_normal(draws: int) -> float:
    """Expected largest of standard normal draws (Blom 1958)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


@functools.lru_cache(4096)
def blocks_met(tokens: int, share: float) -> float:
    """Mean number of blocks of `BLOCK_ROWS` rows that an expert gets from `tokens` tokens, each of
    which chooses it with probability `share`: Σ P(rows > 8 j)."""
    if share >= 1:
        return float(-(-tokens // BLOCK_ROWS))
    rows = np.arange(tokens + 1)
    steps = np.log((tokens - rows[:-1]) / (rows[:-1] + 1)) + math.log(share / (1 - share))
    logs = tokens * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)])
    above = 1 - np.cumsum(np.exp(logs))
    return float(np.sum(above[:tokens:BLOCK_ROWS]))

"""How unevenly tokens choose experts, and what of that a placement leaves for the busiest device.

Measured (counts that a server shows) or synthetic. `noise.py` draws steps from it, `search.py` asks
for the mean. Placements are those that the engine would make (`model.ffn.balance`).
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model.ffn.balance import rebalance
from jaxserve.model.ffn.placement import (
    EMPTY,
    Placement,
    SlotSizes,
    balance_of,
    home_slots,
    rank_loads,
    replica_counts,
)

SAMPLED = 4
"""Layers that a search looks at."""


class Skew(msgspec.Struct, frozen=True):
    """How popular experts are."""

    kind: Literal["spread", "zipf", "counts"]
    size: float = 0.0
    """`spread`: standard deviation over the mean, lognormal. `zipf`: the exponent."""
    counts: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(layer, tokens of each expert), ascending."""

    def popularity(self, random: np.random.Generator, layers: int, experts: int) -> np.ndarray:
        """[layers, experts], rows with sum 1. Layers without counts have those of others.

        Raises:
          ConfigError: counts of another number of experts.
        """
        if self.kind == "counts":
            known = dict(self.counts)
            for layer, counts in self.counts:
                if len(counts) != experts:
                    raise ConfigError(
                        f"--skew: layer {layer} has counts of {len(counts)} experts, the model has "
                        f"{experts}"
                    )
            rows = list(known.values())
            weights = np.array([known.get(n, rows[n % len(rows)]) for n in range(layers)], float)
        elif self.kind == "zipf":
            falling = np.arange(1, experts + 1, dtype=float) ** -self.size
            weights = np.stack([random.permutation(falling) for _ in range(layers)])
        else:
            sigma = np.log1p(self.size**2) ** 0.5
            weights = random.lognormal(0.0, sigma, (layers, experts))
        return weights / weights.sum(axis=1, keepdims=True)


def read_skew(text: str) -> Skew:
    """Of an option: `0.5` (a spread), `zipf:1.2`, or a JSON file with counts, as `GET /pipeline`
    of a server answers or {layer: [tokens, ...]}.

    Raises:
      ConfigError: it is none of these.
    """
    name, _, value = text.rpartition(":")
    try:
        if name in ("", "zipf") and 0 <= float(value) <= 100:
            return Skew("zipf" if name else "spread", float(value))
    except ValueError:
        pass
    try:
        return Skew("counts", counts=_counts(json.loads(Path(text).read_text(encoding="utf-8"))))
    except OSError:
        raise ConfigError(
            f"--skew {text!r}: expected a spread from 0 to 100, zipf:EXPONENT, or a JSON file"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--skew {text}: no counts of experts by layer: {error}") from None


def _counts(tree: Any) -> tuple[tuple[int, tuple[float, ...]], ...]:
    for part in (tree.get("experts"), tree.get("measured"), tree):
        found = (part or {}).get("expert_tokens", tree if part is tree else None)
        if found:
            layers = {int(layer): tuple(map(float, tokens)) for layer, tokens in found.items()}
            counts = tuple(sorted((n, own) for n, own in layers.items() if sum(own) > 0))
            if counts and all(min(own) >= 0 for _, own in counts):
                return counts
    raise ValueError("nothing was counted")


def placement_of(popularity: np.ndarray, sizes: SlotSizes, *, placed: bool) -> Placement:
    """Of one layer: as a rebalance places experts, or every one at home.

    Args:
      popularity: of each expert.
    """
    if not placed:
        return home_slots(sizes)
    return rebalance(popularity.tolist(), sizes.total, sizes.ranks, most=sizes.width, apart=True)


def rank_shares(placement: Placement, sizes: SlotSizes) -> np.ndarray:
    """[experts, ranks]: the part of an expert's tokens that a rank gets."""
    shares, counts = (
        np.zeros((sizes.experts, sizes.ranks)),
        replica_counts(placement, sizes.experts),
    )
    for slot, expert in enumerate(placement):
        if expert != EMPTY:
            shares[expert, slot // sizes.local] += 1 / counts[expert]
    return shares


@functools.lru_cache(maxsize=512)
def mean_busiest(skew: Skew, sizes: SlotSizes, *, placed: bool = True) -> float:
    """Tokens of the busiest rank over the mean, with so many tokens that chance evens out; the mean
    of a few layers."""
    popularity = skew.popularity(np.random.default_rng(0), SAMPLED, sizes.experts)
    found = [
        1 / balance_of(rank_loads(placement_of(row, sizes, placed=placed), row, sizes.ranks))
        for row in popularity
    ]
    return float(np.mean(found))

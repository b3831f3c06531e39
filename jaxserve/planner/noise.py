"""The random inputs of a simulation: durations, lengths, and the choice of experts. How unevenly
tokens choose experts, and what a placement leaves of that for the busiest device.

Called by `simulate.py` and `stage_times.py`; `search.py` asks for means. Everything is drawn from
one seeded generator. Popularity is measured (counts that a server shows) or synthetic; placements
are those that the engine would make (`model/ffn/balance.py`).
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
    replica_counts,
)
from jaxserve.observe.spans import AFDStage

SAMPLED = 4
"""Layers that a search looks at."""


class Jitter(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's duration over its undisturbed one: lognormal with mean 1."""

    spread: dict[AFDStage, float] = {}
    """Standard deviation over the mean, by stage."""

    def draw(self, random: np.random.Generator, stage: AFDStage, seconds: np.ndarray) -> np.ndarray:
        """`seconds` with noise, drawn independently for every entry (a device)."""
        if sigma := self.spread.get(stage, 0.0):
            variance = np.log1p(sigma * sigma)
            seconds = seconds * random.lognormal(-variance / 2, variance**0.5, seconds.shape)
        return seconds


class ExpertLoads:
    """The load imbalance of the ffn devices: every step's choices are drawn from a popularity
    [layers, experts] that stays, rows with sum 1. Experts, and replicas in spare slots, are where a
    rebalance puts them (`placed`), or all at home. `sizes` are the slots of the devices over which
    experts are divided (ep)."""

    def __init__(
        self,
        random: np.random.Generator,
        popularity: np.ndarray,
        sizes: SlotSizes,
        *,
        top_k: int,
        placed: bool = False,
    ):
        self._popularity, self._random, self._top_k = popularity, random, top_k
        self._shares = [
            rank_shares(placement_of(row, sizes, placed=placed), sizes) for row in popularity
        ]

    def busiest(self, layer: int, tokens: int) -> float:
        """Tokens of the busiest device over the mean, in one step of `tokens` tokens."""
        counts = self._random.multinomial(tokens * self._top_k, self._popularity[layer])
        loads = counts @ self._shares[layer]
        return float(loads.max() / max(loads.mean(), 1e-9))

    @property
    def balance(self) -> float:
        """Mean ÷ max tokens of a device in the limit of many tokens, averaged over the layers."""
        each = zip(self._popularity, self._shares, strict=True)
        return float(np.mean([balance_of(row @ shares) for row, shares in each]))


class Skew(msgspec.Struct, frozen=True):
    """How popular experts are."""

    kind: Literal["spread", "zipf", "counts"]
    size: float = 0.0
    """`spread`: standard deviation over the mean, lognormal. `zipf`: the exponent."""
    counts: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(layer, tokens of each expert), ascending."""

    def popularity(self, random: np.random.Generator, layers: int, experts: int) -> np.ndarray:
        """Returns [layers, experts], rows with sum 1. Layers without counts have those of others.
        Raises ConfigError for counts of another number of experts."""
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
    """Reads `0.5` (a spread), `zipf:1.2`, or a JSON file with counts, as `GET /pipeline` of a
    server answers or {layer: [tokens, ...]}. Raises ConfigError for any other text."""
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
    """Returns the placement of one layer's experts: by a rebalance, or every expert at home."""
    if not placed:
        return home_slots(sizes)
    return rebalance(popularity.tolist(), sizes.total, sizes.ranks, most=sizes.width, apart=True)


def rank_shares(placement: Placement, sizes: SlotSizes) -> np.ndarray:
    """[experts, ranks]: the part of an expert's tokens that a rank gets."""
    shares = np.zeros((sizes.experts, sizes.ranks))
    counts = replica_counts(placement, sizes.experts)
    for slot, expert in enumerate(placement):
        if expert != EMPTY:
            shares[expert, slot // sizes.local] += 1 / counts[expert]
    return shares


@functools.lru_cache(maxsize=512)
def mean_busiest(skew: Skew, sizes: SlotSizes) -> float:
    """Returns the tokens of the busiest rank over the mean, in a few rebalanced layers."""
    popularity = skew.popularity(np.random.default_rng(0), SAMPLED, sizes.experts)
    loads = [row @ rank_shares(placement_of(row, sizes, placed=True), sizes) for row in popularity]
    return float(np.mean([1 / balance_of(each) for each in loads]))

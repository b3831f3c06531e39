"""The random inputs of a simulation: durations, lengths, and the choice of experts.

Called by `simulate.py` and `stage_times.py`. Everything is drawn from one seeded generator.
"""

import msgspec
import numpy as np

from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.observe.spans import AFDStage
from jaxserve.planner.skew import placement_of, rank_shares


class Jitter(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's duration over its undisturbed one: lognormal with mean 1; and rare stalls, equally
    long or with a heavy tail."""

    spread: dict[AFDStage, float] = {}
    """Standard deviation over the mean, by stage."""
    stall_probability: float = 0.0
    """Of every stage and device."""
    stall_seconds: float = 0.0
    """Of every stall, or of the shortest."""
    stall_exponent: float = 0.0
    """0: all stalls are equally long. Otherwise they have a Pareto distribution's heavy tail: one
    in 2^exponent of them is more than twice as long as the shortest."""

    @property
    def silent(self) -> bool:
        """Whether nothing is drawn."""
        return not (any(self.spread.values()) or self.stall_probability)

    def draw(self, random: np.random.Generator, stage: AFDStage, seconds: np.ndarray) -> np.ndarray:
        """`seconds` with noise, drawn independently for every entry (a device)."""
        sigma = self.spread.get(stage, 0.0)
        if sigma:
            variance = np.log1p(sigma * sigma)
            seconds = seconds * random.lognormal(-variance / 2, variance**0.5, seconds.shape)
        if self.stall_probability:
            stalls = (random.random(seconds.shape) < self.stall_probability).astype(float)
            if self.stall_exponent:
                hit = stalls > 0
                stalls[hit] += random.pareto(self.stall_exponent, int(hit.sum()))
            seconds = seconds + self.stall_seconds * stalls
        return seconds


class ExpertLoads:
    """The load imbalance of the ffn devices: every step's choices are drawn from a popularity that
    stays.

    Args:
      popularity: [layers, experts] of the experts of every layer, rows with sum 1 (`skew.py`).
      sizes: slots of the devices over which the experts are divided (ep).
      placed: whether experts, and replicas in spare slots, are where a rebalance puts them, or all
        at home.
    """

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
        """Mean ÷ max tokens of a device with so many tokens that chance evens out, mean over the
        layers."""
        loads = [row @ share for row, share in zip(self._popularity, self._shares, strict=True)]
        return float(np.mean([each.mean() / each.max() for each in loads]))


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompts and outputs: lognormal around a mean."""

    prompt: int
    output: int
    spread: float = 0.0
    """Standard deviation over the mean, of both."""
    longest: int
    """Prompt and output together are cut to this."""

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        """(prompt, output) of one request, at least one token each."""
        prompt, output = float(self.prompt), float(self.output)
        if self.spread:
            variance = np.log1p(self.spread**2)
            factors = random.lognormal(-variance / 2, variance**0.5, 2)
            prompt, output = prompt * factors[0], output * factors[1]
        p = min(max(1, round(prompt)), self.longest - 1)
        return p, min(max(1, round(output)), self.longest - p)

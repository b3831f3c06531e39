"""What a deployment is asked for: requests a second, their lengths, and how soon their tokens.

Called by `deploy.py`. Lengths are those of `noise.Lengths`, as a fixed sample instead of draws, so
that a plan is the same every time.
"""

import re
from statistics import NormalDist

import msgspec
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.planner.quantities import seconds

SAMPLE = 4096
"""Requests that stand for all."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What comes in.

    Attributes:
      rate: requests a second, at random (Poisson).
      prompt: tokens, on the mean.
      output: tokens, on the mean.
      spread: of both, standard deviation over mean; lognormal.
      hits: part of every prompt that is in a prefix cache.
    """

    rate: float
    prompt: int
    output: int
    spread: float = 0.0
    hits: float = 0.0

    def requests(self, longest: int, page: int) -> "Requests":
        """Those that stand for all.

        Args:
          longest: prompt and output together are cut to this.
          page: tokens of a page; whole pages are found in a prefix cache.
        """
        order = np.random.default_rng(0).permutation(SAMPLE)
        factors = np.ones(SAMPLE)
        if self.spread:
            variance = np.log1p(self.spread**2)
            deviates = [NormalDist().inv_cdf((n + 0.5) / SAMPLE) for n in range(SAMPLE)]
            factors = np.exp(variance**0.5 * np.array(deviates) - variance / 2)
        prompt = np.clip(np.rint(self.prompt * factors), 1, longest - 1).astype(int)
        output = np.rint(self.output * factors[order]).astype(int)
        output = np.clip(output, 1, longest - prompt)
        found = np.minimum((self.hits * prompt).astype(int), prompt - 1) // page * page
        return Requests(prompt, output, found)

    def longest(self, page: int) -> int:
        """Tokens, in whole pages, that all but a few in ten thousand requests stay below."""
        factor = 1.0
        if self.spread:
            variance = np.log1p(self.spread**2)
            factor = float(np.exp(3.3 * variance**0.5 - variance / 2))
        return -(-int(factor * (self.prompt + self.output) + 1) // page) * page


class Requests(msgspec.Struct, frozen=True):
    """Equally likely requests; arrays of an entry each."""

    prompt: np.ndarray
    output: np.ndarray
    found: np.ndarray
    """Tokens of the prompt that a prefix cache has."""

    @property
    def computed(self) -> np.ndarray:
        """Tokens of the prompt that are not found, at least the last."""
        return self.prompt - self.found

    @property
    def context(self) -> float:
        """Mean tokens in the cache of a running sequence; long outputs run longer."""
        return float(np.average(self.prompt + self.output / 2, weights=self.output))

    @property
    def context_spread(self) -> float:
        """Standard deviation of the same, in tokens."""
        lengths = self.prompt + self.output / 2
        variance = np.average((lengths - self.context) ** 2, weights=self.output)
        inside = np.average(self.output.astype(float) ** 2 / 12, weights=self.output)
        return float((variance + inside) ** 0.5)

    def running(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Cache lengths of so many sequences that run at a moment."""
        which = random.choice(len(self.output), count, p=self.output / self.output.sum())
        done = random.random(count) * self.output[which]
        return self.prompt[which] + done.astype(int)


class Level(msgspec.Struct, frozen=True):
    """A target of the service level: so many percent of the requests within so many seconds."""

    percent: float
    seconds: float

    @property
    def text(self) -> str:
        """As it is typed."""
        shown = f"{self.seconds:g}s" if self.seconds >= 1 else f"{self.seconds * 1e3:g}ms"
        return f"p{self.percent:g}={shown}"


def level(text: str, option: str) -> Level:
    """`p95=2s`; a time alone is p95.

    Raises:
      ConfigError: it is something else, or no percentile from 50 to 99.9.
    """
    name, equals, time = text.rpartition("=")
    match = re.fullmatch(r"\s*p([0-9]{2}(?:\.[0-9]+)?)\s*", name) if equals else None
    percent = float(match[1]) if match else 0.0
    if equals and not 50 <= percent <= 99.9:
        raise ConfigError(
            f"{option} {text!r}: expected a percentile from p50 to p99.9 and a time, as in p95=2s"
        )
    return Level(percent if equals else 95.0, seconds(time, option))

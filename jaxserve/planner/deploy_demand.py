"""Demand of a deployment: requests a second, their lengths, how soon their tokens come, and the
servers that stand by.

Called by `deploy.py`. Lengths are quantiles of `noise.Lengths` instead of draws, so that a plan is
the same every time, and changes no more than what it is for.
"""

import math
from statistics import NormalDist

import msgspec
import numpy as np

from jaxserve.planner.noise import Lengths
from jaxserve.planner.options import reader, seconds, within

SAMPLE = 4096
"""Requests that stand for all where no queue matters."""
GOLDEN = (5**0.5 - 1) / 2


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at a rate.

    Attributes:
      rate: requests a second, at random (Poisson).
      prompt, output: mean tokens.
      spread: standard deviation over mean of both, which are lognormal.
      hits: part of every prompt that is in a prefix cache.
    """

    rate: float
    prompt: int
    output: int
    spread: float = 0.0
    hits: float = 0.0

    def lengths(self, longest: int) -> Lengths:
        """Lengths of prompts and outputs; both together are cut to `longest`."""
        return Lengths(prompt=self.prompt, output=self.output, spread=self.spread, longest=longest)

    def requests(self, longest: int, page: int) -> "Requests":
        """Returns the requests that stand for all.

        Args:
          longest: prompt and output together are cut to this.
          page: tokens of a page; whole pages are found in a prefix cache.
        """
        prompt, output = self.lengths(longest).sample(np.random.default_rng(0), SAMPLE)
        found = np.minimum((self.hits * prompt).astype(int), prompt - 1) // page * page
        return Requests(prompt, output, found)

    def longest(self, page: int) -> int:
        """Tokens, in whole pages, that all but a few in ten thousand requests stay below."""
        variance = np.log1p(self.spread**2)
        factor = float(np.exp(3.3 * variance**0.5 - variance / 2))
        return -(-int(factor * (self.prompt + self.output) + 1) // page) * page


class Requests(msgspec.Struct, frozen=True):
    """Equally likely requests; arrays with an entry for each."""

    prompt: np.ndarray
    output: np.ndarray
    found: np.ndarray
    """Tokens of the prompt that a prefix cache has."""

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

    def running(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cache lengths of `count` sequences that run at a moment, and the tokens that each still
        generates, int `[count]`: the same fixed quadrature for every call."""
        order = np.argsort(self.prompt + self.output, kind="stable")
        share = np.cumsum(self.output[order]) / self.output.sum()
        which = order[np.searchsorted(share, (np.arange(count) + 0.5) / count)]
        done = ((np.arange(count) * GOLDEN + 0.5) % 1 * self.output[which]).astype(int)
        mixed = np.random.default_rng(0).permutation(count)
        return (self.prompt[which] + done)[mixed], (self.output[which] - done)[mixed]

    def quantile(self, share: float, *, of_tokens: bool = False) -> tuple[int, int]:
        """Tokens of a prompt that this share of prompts stays below, and those of it found.

        Args:
          of_tokens: of all computed tokens, in the order of their prompts' lengths, this share
            comes before the prompt's.
        """
        order = np.argsort(self.prompt, kind="stable")
        each = (self.prompt - self.found)[order] if of_tokens else np.ones(len(order))
        before = np.cumsum(each)
        place = int(order[np.searchsorted(before, share * before[-1])])
        return int(self.prompt[place]), int(self.found[place])


class Level(msgspec.Struct, frozen=True):
    """A target of the service level: this percentage of the requests within a time."""

    percent: float
    seconds: float

    @property
    def text(self) -> str:
        shown = f"{self.seconds:g}s" if self.seconds >= 1 else f"{self.seconds * 1e3:g}ms"
        return f"p{self.percent:g}={shown}"


level = reader(
    r"(?:p(\d\d(?:\.\d+)?)\s*=)?(.*)",
    "a percentile from p50 to p99.9 and a time, as in p95=2s",
    lambda percent, time: Level(within(50, float(percent or 95), 99.9), seconds(time)),
)
"""Reads `p95=2s`; a time alone is p95."""


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that stand by. A unit or worker that loses a server waits until it has another.

    Attributes:
      count: servers of every role; with `between` those that failures ask for, at least.
      between: hours from one failure of a server to its next, on the mean; 0: none are looked at.
      repair: hours that a failed server is away.
      share: of the time in which there are enough.
    """

    count: int = 0
    between: float = 0.0
    repair: float = 0.0
    share: float = 0.999

    def hosts(self, used: int) -> int:
        """Spare servers of a role: the number of failed ones at a moment is Poisson's.

        Args:
          used: servers that the role uses.
        """
        if not self.between or not used:
            return self.count if used else 0
        away = used * self.repair / (self.between + self.repair)
        if away > 500:  # where e^-away has no digits left, Poisson's numbers are normal
            failed = math.ceil(away + NormalDist().inv_cdf(self.share) * away**0.5)
            return max(self.count, min(used, failed))
        chance = total = math.exp(-away)
        failed = 0
        while total < self.share and failed < used:
            failed += 1
            chance *= away / failed
            total += chance
        return max(self.count, failed)

    @property
    def text(self) -> str:
        if not self.between:
            return (
                f"{self.count} servers of every role, as asked" if self.count else "none asked for"
            )
        failing = f"a server fails every {self.between:g} h and is away for {self.repair:g} h"
        return f"{failing}; enough of them stand by in {self.share:.1%} of the time"


failures = reader(
    r"([\d.]+)h:([\d.]+)h",
    "hours between a server's failures, and those that it is away, as in 1000h:12h",
    lambda between, away: (float(between), within(1e-9, float(away), float(between))),
)
"""Reads `1000h:12h`: hours from one failure of a server to its next, and those that it is away."""

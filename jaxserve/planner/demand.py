"""Demand of a deployment: requests a second, their lengths, their targets, and the servers that
stand by.

Lengths are quantiles of their distribution instead of draws, so that a plan is the same every time,
and changes no more than what it is for.
"""

from statistics import NormalDist

import msgspec
import numpy as np

SAMPLE = 4096
"""Requests that stand for all where no queue matters."""
GOLDEN = (5**0.5 - 1) / 2


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompts and outputs: lognormal around a mean."""

    prompt: int
    output: int
    spread: float = 0.0
    """Standard deviation over the mean, of both."""
    longest: int
    """Prompt and output together are cut to this."""

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        """Returns (prompt, output) of one request, at least one token each."""
        factors = np.ones(2)
        if self.spread:
            variance = np.log1p(self.spread**2)
            factors = random.lognormal(-variance / 2, variance**0.5, 2)
        prompt = min(max(1, round(self.prompt * factors[0])), self.longest - 1)
        return prompt, min(max(1, round(self.output * factors[1])), self.longest - prompt)

    def sample(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompts and outputs of `count` requests, int `[count]` each.

        Every quantile occurs once, in random order, so that a few hundred requests have the
        distribution's mean and tail, and 1 % more in a mean is 1 % more in every length.
        """
        sigma, places = float(np.log1p(self.spread**2)) ** 0.5, (np.arange(count) + 0.5) / count
        factors = np.exp(sigma * np.array([NormalDist().inv_cdf(one) for one in places]))
        factors /= factors.mean()
        prompt = np.rint(self.prompt * random.permutation(factors))
        prompt = np.clip(prompt, 1, self.longest - 1).astype(int)
        output = np.rint(self.output * random.permutation(factors)).astype(int)
        return prompt, np.clip(output, 1, self.longest - prompt)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a second, at random (Poisson). Tokens are lognormal around means, with a `spread` in
    standard deviations over the mean; a prefix cache has a part of every prompt (`hits`)."""

    rate: float
    prompt: int
    output: int
    spread: float = 0.0
    hits: float = 0.0

    def lengths(self, longest: int) -> Lengths:
        return Lengths(prompt=self.prompt, output=self.output, spread=self.spread, longest=longest)

    def requests(self, longest: int, page: int) -> "Requests":
        """Returns the requests that stand for all. Prompt and output together are cut to `longest`;
        whole pages of `page` tokens are found in a prefix cache."""
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

    @property
    def computed(self) -> float:
        """Mean tokens of a prompt that a prefix cache does not have."""
        return float((self.prompt - self.found).mean())

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
        """Tokens of a prompt that this share of prompts stays below, and those of it found; or,
        `of_tokens`, this share of all computed tokens, in the order of their prompts' lengths."""
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


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that stand by: a `count` of every role, or with `between` at least that. A unit
    or worker that loses a server waits until it has another. Servers fail every `between` hours (0:
    never) and are away for `repair` hours; enough of them stand by in a `share` of the time."""

    count: int = 0
    between: float = 0.0
    repair: float = 0.0
    share: float = 0.999

    def hosts(self, used: int) -> int:
        """Spare servers of a role that uses `used`, by Poisson's number of failed ones."""
        if not self.between or not used:
            return self.count if used else 0
        away, failed = used * self.repair / (self.between + self.repair), np.arange(used)
        logs = np.cumsum(np.log(away / np.maximum(failed, 1)) * (failed > 0)) - away
        return max(self.count, int(np.searchsorted(np.cumsum(np.exp(logs)), self.share)))

    @property
    def text(self) -> str:
        if self.between:
            failing = f"a server fails every {self.between:g} h and is away for {self.repair:g} h"
            return f"{failing}; enough of them stand by in {self.share:.1%} of the time"
        return f"{self.count} servers of every role, as asked" if self.count else "none asked for"

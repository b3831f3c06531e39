"""Random prompts, and requests that an engine runs together, with the times of their tokens."""

import queue
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.bench.workers import BenchError
from jaxserve.config.shipped import CONFIGS
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.link.pages.source import PagesSource

DEMO = CONFIGS / "demo.yaml"
OUTPUT_SECONDS = 60.0
"""Longest time without a token, unless a bench has more patience."""


def random_prompts(draw: random.Random, count: int, tokens: int, vocab: int) -> list[list[int]]:
    """Draws `count` prompts of `tokens` token ids below `vocab`."""
    return [[draw.randrange(vocab) for _ in range(tokens)] for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    """Exactly `tokens` greedy tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class Ran(NamedTuple):
    """Requests that ran together.

    Attributes:
      seconds: from the first submit to the last token.
      core_seconds: core time of this process in that time.
      arrivals: for each request the times of its tokens, seconds after the first submit.
      tokens: for each request its tokens.
    """

    seconds: float
    core_seconds: float
    arrivals: list[list[float]]
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """Tokens a second of all requests."""
        return sum(map(len, self.arrivals)) / self.seconds


def run_requests(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    source: PagesSource | None = None,
    patience: float = OUTPUT_SECONDS,
) -> Ran:
    """Runs requests together and waits for their ends.

    Args:
      params: of all requests, or of each.
      source: a prefill worker that holds the pages of the prompts.
      patience: longest time without a token, seconds.

    Raises:
      BenchError: a request ended early, or no token came in time.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs: queue.SimpleQueue[tuple[int, float, TokenOutput]] = queue.SimpleQueue()
    arrivals: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    start, core = time.perf_counter(), time.process_time()

    def submit(number: int, prompt: Sequence[int], params: SamplingParams) -> None:
        def came(output: TokenOutput) -> None:
            outputs.put((number, time.perf_counter() - start, output))

        engine.submit(prompt, params, came, source=source)

    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        submit(number, prompt, one)
    left = len(prompts)
    while left:
        try:
            number, at, output = outputs.get(timeout=patience)
        except queue.Empty:
            why = f"no token for {patience:g} s; engine: {engine.status}"
            raise BenchError(why) from None
        if output.finish_reason not in (None, "length"):
            raise BenchError(f"request {number} ended with {output.finish_reason}: {output.error}")
        arrivals[number] += [at] * len(output.token_ids)
        tokens[number] += output.token_ids
        left -= output.finish_reason is not None
    return Ran(time.perf_counter() - start, time.process_time() - core, arrivals, tokens)

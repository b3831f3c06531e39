"""The effect of long prefills on the time between tokens of running decodes: part of `bench fleet`.

One process plays a prefill worker and one a domain, each on a core of its own, with random weights.
A few sequences decode in the domain, in turn

- alone;
- while long prompts come, one for each `TOKENS_BETWEEN` tokens, and the other process prefills them
  and hands them over;
- while the same prompts come to the domain itself, which prefills them in chunks beside its
  decodes, as a colocated worker does.
"""

import os
import random
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxserve.bench.hand_off import answer_prompts, prefill_worker, prefilled, start_worker
from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.bench.requests import greedy, random_prompts, run_requests
from jaxserve.bench.workers import BenchError, Helper, Worker, run_worker, say, two_cores
from jaxserve.config.model import FFN, MFA, ModelConfig, Rope, decoder_layers
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import TokenOutput
from jaxserve.link.pages.source import PagesSource

LIMIT = 1.3
DECODES, SLOTS = 4, 8
PROMPT_TOKENS = 769
"""Length of a long prompt: 48 pages and a token."""
CHUNK_TOKENS = 64
"""Tokens of a long prompt in one step beside decodes, where both run together."""
TOKENS_BETWEEN = 100
"""Tokens of a decoding sequence for each long prompt: the loads are the same on any machine."""
VOCAB, PAGE_SIZE, MAX_LENGTH = 256, 16, 1088
LOADS = ("none", "handed over", "chunked")
_SECONDS = 1200.0


def measure(quick: bool) -> Iterator[Part]:
    """Runs both processes and compares; starts no JAX in this one."""
    rounds, tokens = (1, 60) if quick else (4, 400)
    cores = two_cores("interference")
    arguments = {"rounds": rounds, "tokens": tokens, "prefill_core": cores[0]}
    found = run_worker(Worker(measure_loads, arguments, core=cores[1]), _SECONDS)
    gaps, prompts = found["gaps"], found["prompts"]
    p99 = {load: percentile(gaps[load], 99) for load in LOADS}
    measures = []
    for load, name in zip(LOADS, ("no prefills", "handed over", "chunked here"), strict=True):
        middle = statistics.median(gaps[load])
        measures += [
            Measure(f"time between tokens, {name}: median", middle * 1e3, "ms"),
            Measure("  p99", p99[load] * 1e3, "ms"),
        ]
    measures += [
        Measure("p99 handed over ÷ no prefills", p99["handed over"] / p99["none"], "", LIMIT),
        Measure("p99 chunked here ÷ no prefills", p99["chunked"] / p99["none"]),
    ]
    notes = [
        f"{DECODES} sequences decode; a prompt of {PROMPT_TOKENS} tokens comes every "
        f"{TOKENS_BETWEEN} of their steps, and is prefilled in chunks of {CHUNK_TOKENS} where "
        f"there are decodes. {rounds} rounds of the three in turn; prompts that came: "
        f"{prompts['handed over']} and {prompts['chunked']}.",
        "Processes pinned: the prefill worker to one core, the domain to the other.",
    ]
    title = "time between tokens beside long prefills"
    yield Part("interference", title, measures, notes, found)


def open_worker(role: str) -> Engine:
    """Starts an engine of this bench (see `hand_off.start_worker`)."""
    attention = MFA(q_heads=2, kv_heads=1, head_dim=256, latent=128, rope=Rope(theta=1e4))
    config = ModelConfig(
        vocab=256,
        d_model=512,
        decoder=decoder_layers(6, attention, FFN(d_ff=2048)),
        norm_epsilon=1e-5,
        max_positions=MAX_LENGTH,
    )
    overrides = {
        "scheduler.token_budget": 128,
        "scheduler.token_buckets": [SLOTS, CHUNK_TOKENS + SLOTS, 128],
        "scheduler.prefill_tokens": CHUNK_TOKENS,
        "pages.step_tokens": 128,
    }
    return start_worker(role, config, SLOTS, overrides)


def prefill(core: int) -> None:
    """The prefill worker; says that it is ready."""
    os.sched_setaffinity(0, {core})
    engine = open_worker("prefill")
    say("ready")
    answer_prompts(engine)


def measure_loads(rounds: int, tokens: int, prefill_core: int) -> dict[str, Any]:
    """The domain: seconds between tokens of the running decodes by load, and prompts that came."""
    gaps: dict[str, list[float]] = {load: [] for load in LOADS}
    prompts = dict.fromkeys(LOADS, 0)
    with prefill_worker(prefill, prefill_core) as helper:
        engine, draw = open_worker("domain"), random.Random(0)
        helper.answer()
        long = _LongPrompts(engine, helper)
        for number in range(rounds + 1):
            for load in LOADS:
                long.load = load
                short = random_prompts(draw, DECODES, PAGE_SIZE, VOCAB)
                asked = greedy(tokens if number else 20)
                ran = run_requests(engine, short, asked, on_output=long.on_output)
                came = long.wait()
                if number:  # the first one connects, and faults memory in
                    gaps[load] += ran.gaps
                    prompts[load] += came
        engine.close()
    return {"gaps": gaps, "prompts": prompts}


class _LongPrompts:
    """Long prompts that come beside the decodes, one for each `TOKENS_BETWEEN` tokens of the first
    decoding sequence."""

    def __init__(self, engine: Engine, helper: Helper):
        self.load = "none"
        self._engine, self._helper, self._draw = engine, helper, random.Random(1)
        self._tokens = 0
        self._handing = ThreadPoolExecutor(1)
        self._submitted: list[Future[None]] = []
        self._ended = threading.Semaphore(0)

    def on_output(self, number: int, output: TokenOutput) -> None:
        """Counts the tokens of the first sequence, and begins a prompt in time."""
        self._tokens += number == 0
        if number or self.load == "none" or self._tokens % TOKENS_BETWEEN != 10:
            return
        (prompt,) = random_prompts(self._draw, 1, PROMPT_TOKENS, VOCAB)
        self._submitted.append(self._handing.submit(self._submit, prompt))

    def wait(self) -> int:
        """Waits until all prompts have been answered; returns their number.

        Raises:
          BenchError: one was not held, or not answered in time.
        """
        for one in self._submitted:
            one.result(_SECONDS)
            if not self._ended.acquire(timeout=_SECONDS):
                raise BenchError(f"a long prompt was not answered within {_SECONDS:g} s")
        came, self._submitted, self._tokens = len(self._submitted), [], 0
        return came

    def _submit(self, prompt: list[int]) -> None:
        source: PagesSource | None = None
        if self.load == "handed over":
            source = prefilled(self._helper, prompt)

        def on_output(output: TokenOutput) -> None:
            if output.finish_reason is not None:
                self._ended.release()

        self._engine.submit(prompt, greedy(2), on_output, source=source)

"""Random deployments under concurrent requests that share prefixes, against the engine alone.

Every answer is compared token for token, and by its log-probabilities, with the plain colocated
engine's, which runs one request at a time. Afterwards no page, slot or lease may be left.

`make test` runs draw 3, `make nightly` nine more and two of each family, and `make fuzz DRAWS=60
SEED=10` any others. A draw is printed with its seed; `FUZZ_DRAW=DRAW` runs that draw alone, or what
is left of it.
"""

import contextlib
import itertools
import math
import os
import threading
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
import pytest

from jaxserve.bench.mixes import EveryOther
from jaxserve.config.attention.mla import MLA
from jaxserve.config.checks import scratch_pages
from jaxserve.config.model import Expansion
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.errors import JaxserveError
from jaxserve.fleet import host_tier
from jaxserve.fleet.assembly import build_runtime, make_engine
from jaxserve.link.pages.source import PagesSource
from pallas_kernels.attention import expanded
from tests.jaxserve import draws
from tests.jaxserve.draws import Draw, Request
from tests.jaxserve.hand_offs import attach, limits
from tests.jaxserve.hidden_parts import parts_of, round_parts
from tests.jaxserve.losing import Losing
from tests.jaxserve.waiting import until
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_deepseek_v4 import WITH_MODULE
from tests.reference.tiny_qwen3_next import QWEN3_5, QWEN3_NEXT
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

FIRST = int(os.environ.get("FUZZ_SEED", "0"))
COUNT = int(os.environ.get("FUZZ_DRAWS", "0"))
GIVEN = os.environ.get("FUZZ_DRAW", "")
OFTEN = 3
"""The draw of `make test`."""
SECONDS = 120.0

MOST_RUNTIMES = 6
"""Compiled programs of a runtime take thousands of the mappings that a process may have."""

WINDOW = CATALOGUE["gpt_oss"]
WRITERS = {name: entry.write for name, entry in CATALOGUE.items()} | {
    "step3": write_tiny_step3,
    **{
        one.name: replace(one, sizes=replace(one.sizes, module=True)).write
        for one in (QWEN3_NEXT, QWEN3_5)
    },
    "deepseek_v4": WITH_MODULE.write,
    WINDOW.name: replace(WINDOW, sizes=replace(WINDOW.sizes, sliding_window=21)).write,
}

BOUNDS, BOUNDS_OF_8_BITS = {"float32": (1e-4, 2e-3), "int8": (0.02, 0.1)}, (0.1, 0.5)
"""Greedy tokens whose logits lie closer may change places, and log-probabilities of a token may
differ by this. The last digit of an FP32 sum may decide how a value is rounded to 8 bits."""


class Answer(NamedTuple):
    """Result of one request."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    """Distance of the two best log-probabilities, where the request asked for two."""
    prompt: list[float]
    end: str
    error: str


class Answers:
    """Gathers the news of all requests of a draw."""

    def __init__(self) -> None:
        self._news: dict[int, list[TokenOutput]] = {}
        self._ends: dict[int, tuple[str, str]] = {}
        self.changed = threading.Condition()
        self.total = 0
        """News of all requests together: tokens, hand-offs and ends."""

    def open(self, number: int) -> None:
        """A request is about to be submitted."""
        with self.changed:
            self._news[number] = []

    def add(self, number: int, news: TokenOutput) -> int:
        """Takes a piece of news; returns how many tokens the request has now."""
        with self.changed:
            assert number not in self._ends, f"news after the end: {news}"
            self._news[number].append(news)
            self.total += max(1, len(news.token_ids))
            if news.finish_reason is not None:
                self._ends[number] = news.finish_reason, news.error or ""
            self.changed.notify_all()
            return sum(len(one.token_ids) for one in self._news[number])

    def held(self) -> None:
        """A prefill worker holds the pages of some request."""
        with self.changed:
            self.total += 1
            self.changed.notify_all()

    @property
    def running(self) -> set[int]:
        """Requests that were submitted and have not ended."""
        return self._news.keys() - self._ends.keys()

    def of(self, number: int) -> Answer:
        """Result of a request, after its end."""
        news = self._news[number]
        ranked = [one for each in news for one in each.logprobs]
        scores = [one for each in news for one in each.prompt_logprobs or []]
        tops = [[logprob for _, logprob in one.top] for one in ranked]
        return Answer(
            [token for each in news for token in each.token_ids],
            [one.logprob for one in ranked],
            [top[0] - top[1] for top in tops if len(top) > 1],
            [one.logprob for one in scores if one is not None],
            *self._ends[number],
        )


class Fuzz:
    """Runs draws; keeps models, warm runtimes and their programs for the next draw."""

    def __init__(self, folder):
        self._folder = folder
        self._runtimes: dict[str, Runtime] = {}

    def run(self, draw: Draw) -> list[str]:
        """Lists defects in the answers to a draw, and in the state that it leaves."""
        expected = self._alone(draw)
        engines = []
        try:
            decode = self._engine(draw, "decode", draw.decode, draw.spare[0])
            engines.append(decode)
            prefill = None
            if draw.prefill is not None:
                prefill = self._engine(draw, "prefill", draw.prefill, draw.spare[1])
                engines.append(prefill)
            with pytest.MonkeyPatch.context() as patch:
                running = Running(draw, expected, decode, prefill)
                answers = running.answers(Losing(decode, patch))
            rows = zip(draw.requests, expected, answers, strict=True)
            problems = [
                f"request {one.number}: {problem}"
                for one, right, found in rows
                for problem in differences(draw.format, one, right, found)
            ]
            for engine in engines:
                problems += left_behind(engine)
        except Exception as error:  # of an engine, or of one of its threads
            problems = [f"{type(error).__name__}: {error}"]
            self._runtimes.clear()
        finally:
            for engine in engines:
                engine.close()
            if draw.moves:  # the next engine would take experts for at home
                self._runtimes.clear()
        return problems

    def _alone(self, draw: Draw) -> list[Answer]:
        """Answers of the plain colocated engine, one request after the other."""
        engine = make_engine(
            self._runtime(draw, "alone", {"mode": "colocated", "cache.page_size": 32}),
            eos_token_ids=frozenset(),
        )
        engine.start()
        answers = Answers()
        for one, prompt in zip(draw.requests, draw.prompts(), strict=True):
            params = msgspec.structs.replace(
                params_of(one, engine), logprobs=2, cache_salt=f"alone {one.number}"
            )
            answers.open(one.number)
            engine.submit(prompt, params, lambda news, n=one.number: answers.add(n, news))
            with answers.changed:
                assert answers.changed.wait_for(lambda: not answers.running, SECONDS)
        engine.close()
        return [answers.of(one.number) for one in draw.requests]

    def _engine(self, draw: Draw, role: str, overrides, spare: int) -> Engine:
        runtime = self._runtime(draw, role, overrides)
        whole = runtime.deployment
        cache, policy = whole.cache, whole.scheduler
        longest = -(-draws.LONGEST // cache.page_size) + scratch_pages(whole.drafts, whole.modules)
        pace = {"prefill_tokens": draw.chunk, "token_ms": draw.seed % 3}
        fewer = msgspec.structs.replace(
            whole,
            cache=msgspec.structs.replace(
                cache,
                pages=min(cache.pages, longest + spare),
                storage=f"{self._folder}/pages {draw.seed}" if draw.disk and cache.host_gb else "",
            ),
            scheduler=msgspec.structs.replace(policy, **pace),
            pages=msgspec.structs.replace(whole.pages, held=draw.held),
        )
        engine = make_engine(runtime._replace(deployment=fewer), eos_token_ids=frozenset())
        if draw.prefill is not None:
            attach(engine, role)
        engine.start()
        return engine

    def _runtime(self, draw: Draw, role: str, overrides) -> Runtime:
        options = {**draws.FORMATS[draw.format], **overrides}
        options["cache.pages"] = draws.ARRAY_TOKENS // options.get("cache.page_size", 16)
        parts = parts_of(draw)
        key = f"{role} {draw.model} {parts} {sorted(options.items())}"
        if key not in self._runtimes:
            if len(self._runtimes) >= MOST_RUNTIMES:
                self._runtimes.clear()
            folder = self._folder / draw.model
            if not folder.exists():
                WRITERS[draw.model](folder)
            # Latents are expanded for chunks of three tokens and more, a page at a time.
            least = math.inf if role == "alone" else 3
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MLA, "expansion", Expansion(least, 0, 0))
                patch.setattr(expanded, "EXPANDED_PAGE", 4)
                patch.setattr(expanded, "EXPANDED_POSITIONS", 8)
                if parts > 1:
                    round_parts(patch, parts)
                self._runtimes[key] = build_runtime(limits(folder, options))
            warm_up(self._runtimes[key])
        return self._runtimes[key]


class Running:
    """The requests of one draw on their way through its engines."""

    def __init__(self, draw: Draw, expected: list[Answer], decode: Engine, prefill: Engine | None):
        self._draw, self._decode, self._prefill = draw, decode, prefill
        self._prompts = dict(
            zip((one.number for one in draw.requests), draw.prompts(), strict=True)
        )
        rows = zip(draw.requests, expected, strict=True)
        self._emitted = {one.number: right.tokens[: one.emitted] for one, right in rows}
        self._answers = Answers()

    def answers(self, losing: Losing) -> list[Answer]:
        """Submits all requests; resets, cancels and loses steps in the middle."""
        answers, waiting = self._answers, list(self._draw.requests)
        events = [(after, self._reset) for after in self._draw.resets]
        events += [(after, self._move_experts) for after in self._draw.moves]
        for after in self._draw.losses:
            events.append((after, partial(losing.lose, ("result", "stage")[after % 2])))
        events.sort(key=lambda event: event[0])
        end = time.monotonic() + SECONDS

        def due() -> bool:
            times = [waiting[0].after] if waiting else []
            times += [after for after, _ in events[:1]]
            return not answers.running or answers.total >= min(times, default=10**9)

        while waiting or answers.running:
            with answers.changed:
                assert answers.changed.wait_for(due, end - time.monotonic()), (
                    f"requests {sorted(answers.running)} did not end within {SECONDS} s"
                )
                quiet = not answers.running
            while waiting and (waiting[0].after <= answers.total or quiet):
                after = waiting[0].after
                while waiting and waiting[0].after == after:  # a burst
                    self._start(waiting.pop(0))
                quiet = False
            while events and events[0][0] <= answers.total:
                events.pop(0)[1]()
        return [answers.of(one.number) for one in self._draw.requests]

    def _reset(self) -> None:
        for engine in self._engines():
            engine.reset_prefix_cache()

    def _move_experts(self) -> None:
        if (experts := self._decode.experts) is not None:
            with contextlib.suppress(ValueError):  # they are on their way
                experts.place({n: own[::-1] for n, own in experts.placements.items()})

    def _engines(self) -> list[Engine]:
        return [engine for engine in (self._prefill, self._decode) if engine is not None]

    def _start(self, one: Request) -> None:
        self._answers.open(one.number)
        if self._prefill is None:
            self._submit(one, None)
        else:
            self._prefill.prefill(
                self._prompts[one.number] + self._emitted[one.number],
                lambda news: self._held(one, news),
                cache_salt=one.tenant,
                request_id=f"{one.number}",
            )
        if one.cancel == 0:
            self._cancel(one)

    def _held(self, one: Request, news: PagesSource | JaxserveError) -> None:
        self._answers.held()
        if isinstance(news, PagesSource):
            self._submit(one, news)
            return
        cancelled = one.cancel == 0 and "was cancelled" in str(news)
        reason = "cancelled" if cancelled else "error"
        end = TokenOutput(request_id="", finish_reason=reason, error=str(news))
        self._answers.add(one.number, end)

    def _submit(self, one: Request, source: PagesSource | None) -> None:
        def on_output(news: TokenOutput) -> None:
            tokens = self._answers.add(one.number, news)
            if news.finish_reason is None and one.cancel is not None and tokens >= one.cancel:
                self._cancel(one)

        try:
            self._decode.submit(
                self._prompts[one.number],
                params_of(one, self._decode),
                on_output,
                request_id=f"{one.number}",
                source=source,
                emitted=self._emitted[one.number],
            )
        except JaxserveError as error:
            end = TokenOutput(request_id="", finish_reason="error", error=str(error))
            self._answers.add(one.number, end)

    def _cancel(self, one: Request) -> None:
        for engine in self._engines():
            engine.cancel(f"{one.number}")


def params_of(one: Request, engine: Engine) -> SamplingParams:
    """How a request's tokens are chosen."""
    draws_of_it = {} if one.seed is None else {"temperature": 0.9, "top_p": 0.9, "seed": one.seed}
    options = {"temperature": 0.0, "max_tokens": one.tokens, "ignore_eos": True} | draws_of_it
    return SamplingParams(
        **options | draws.RULES[one.rules],
        grammar=EveryOther(engine.model_info()["vocab_size"]) if one.rules == "grammar" else None,
        logprobs=0,
        prompt_logprobs=0 if one.scores else None,
        cache_salt=one.tenant,
    )


def differences(format: str, one: Request, right: Answer, found: Answer) -> list[str]:
    """Describes the defect of an answer; empty if it has none."""
    if found.end == "error":
        return [f"error: {found.error}"]
    if found.end != right.end and (found.end != "cancelled" or one.cancel is None):
        return [f"ended by {found.end} instead of {right.end}"]
    tie, near = BOUNDS.get(format, BOUNDS_OF_8_BITS)
    expected = right.tokens[one.emitted :]
    logprobs, margins = right.logprobs[one.emitted :], right.margins[one.emitted :]
    problems = []
    if found.end == "cancelled":
        expected = expected[: len(found.tokens)]
    same = len(expected)
    for place, (a, b) in enumerate(itertools.zip_longest(found.tokens, expected)):
        if a != b:
            same = place
            greedy = one.seed is None and not one.rules
            tied = None not in (a, b) and greedy and margins[place] <= tie
            if not tied:
                problems.append(f"{found.tokens} instead of {expected}")
            break
    pairs = [*zip(found.logprobs[:same], logprobs, strict=False)]
    if one.scores and found.end != "cancelled":
        if len(found.prompt) != len(right.prompt):
            problems.append(f"{len(found.prompt)} prompt scores instead of {len(right.prompt)}")
        pairs += zip(found.prompt, right.prompt, strict=False)
    if (apart := max((abs(a - b) for a, b in pairs), default=0.0)) > near:
        problems.append(f"a log-probability is off by {apart:.3g}")
    return problems


def left_behind(engine: Engine) -> list[str]:
    """Describes what an engine still holds although every request has ended."""

    def left() -> dict[str, object]:
        load = engine.load()
        counters = [end.client.counters for end in getattr(engine.hand_offs, "domains", ())]
        found = {
            "open requests": len(engine._open),
            "work": sum(scheduler.has_work for scheduler in engine.schedulers),
            "held prompts": engine.hand_offs.held,
            "page actions": len(engine._loop._page_actions) + len(engine._loop._imports),
            "fetches": sum(len(scheduler.fetches._fetches) for scheduler in engine.schedulers),
            "queued pages": sum(each.queued for each in counters),
            "registered bytes": load.hand_offs.registered_bytes if load.hand_offs else 0,
            "pages in use": sum(sum(scheduler.kv_usage) for scheduler in engine.schedulers),
        }
        return {name: count for name, count in found.items() if count}

    try:
        until(lambda: not left(), 20.0)
    except AssertionError:
        return [f"left behind: {left()}"]
    for scheduler in engine.schedulers:
        scheduler.check_integrity()
    compiled = engine.compilations_after_ready
    return [f"{compiled} programs were compiled after the start"] if compiled else []


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_tier, "PAGES", (1, 4))  # few programs
        yield Fuzz(tmp_path_factory.mktemp("models"))


EVERY_FAMILY = range(draws.CHEAP, draws.CHEAP + 2 * len(draws.MODELS))
EIGHT_BITS = 52, 68, 79, 80, 111  # caches of either format, and all in 8 bits, over two ranks, too
SEEDS = [
    pytest.param(seed, marks=() if seed == OFTEN else pytest.mark.nightly)
    for seed in (*range(6), *EVERY_FAMILY, *EIGHT_BITS)
]
if GIVEN or COUNT:
    SEEDS = [-1] if GIVEN else [*range(FIRST, FIRST + COUNT)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answers_are_those_of_the_engine_alone(seed, fuzz):
    draw = draws.read(GIVEN) if GIVEN else draws.draw(seed)
    print(f"FUZZ_SEED={seed} FUZZ_DRAW='{draw.text()}'")
    assert fuzz.run(draw) == []

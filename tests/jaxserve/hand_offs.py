"""Two engines with a pages link between them, in one process; and what is asked of them.

Used by the tests of the hand-off. The two share the process's devices, not their arrays.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.runtime import warm_up
from jaxserve.errors import JaxserveError
from jaxserve.fleet.assembly import build_runtime, make_engine
from jaxserve.fleet.domain_end import fetch_pages
from jaxserve.fleet.prefill_end import serve_pages
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Deadlines
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Collector
from tests.jaxserve.waiting import until

PIECES = (32, 64)
TOKEN = "a secret"

LIMITS: dict[str, Any] = golden.sizes("hand-offs")
"""One bucket of tokens: prompts longer than 32 are chunked."""


def limits(folder: Path, overrides: dict[str, Any]) -> Deployment:
    """A deployment of the model; page buckets follow from the page size."""
    merged = LIMITS | overrides
    longest = -(-merged["scheduler.max_length"] // merged["cache.page_size"])
    return load_deployment(folder, merged | {"scheduler.page_buckets": [longest]})


def open_worker(
    folder: Path, role: str, overrides: dict[str, Any], deadlines: Deadlines | None = None
) -> Engine:
    """A running engine with its end of the pages link."""
    runtime = build_runtime(limits(folder, overrides))
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    attach(engine, role, deadlines)
    engine.start()
    return engine


def attach(engine: Engine, role: str, deadlines: Deadlines | None = None) -> None:
    """Gives an engine its end, with small pieces."""
    options: dict[str, Any] = {"pieces": PIECES}
    if deadlines is not None:
        options["deadlines"] = deadlines
    if role == "prefill":
        serve_pages(engine, TOKEN, **options)
    else:
        fetch_pages(engine, TOKEN, **options)


@contextlib.contextmanager
def workers(folder: Path, **overrides: dict[str, Any]) -> Iterator[list[Engine]]:
    """Engines by name, which begins with their role: `prefill={…}, decode={…}`."""
    with contextlib.ExitStack() as stack:
        engines = []
        for name, own in overrides.items():
            engine = open_worker(folder, name.rstrip("0123456789"), own)
            stack.callback(engine.close)
            engines.append(engine)
        yield engines


class Held:
    """Waits for what `Engine.prefill` says."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self.news: PagesSource | JaxserveError | None = None

    def __call__(self, news: PagesSource | JaxserveError) -> None:
        assert self.news is None, "told twice"
        self.news = news
        self._there.set()

    def wait(self, seconds: float = 60.0) -> PagesSource:
        """Where the pages are held; raises what went wrong."""
        assert self._there.wait(seconds), f"not held within {seconds} s"
        if isinstance(self.news, Exception):
            raise self.news
        assert self.news is not None
        return self.news


def prefill(engine: Engine, prompt: list[int], **options: Any) -> PagesSource:
    """Runs a prompt and says where its pages are held."""
    held = Held()
    engine.prefill(prompt, held, **options)
    return held.wait()


def hand_over(
    source_engine: Engine,
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    change: Callable[[PagesSource], PagesSource] = lambda source: source,
) -> list[list[int]]:
    """The tokens after the prompts, all prefilled by one engine and decoded by another, each as
    soon as it is held: room for the next is made by those that are fetched."""
    held, collector = queue.SimpleQueue[tuple[int, Any]](), Collector()
    for number, prompt in enumerate(prompts):
        source_engine.prefill(prompt, lambda news, number=number: held.put((number, news)))
    for _ in prompts:
        number, news = held.get(timeout=60.0)
        source = change(news)
        collector.submit(engine, prompts[number], params, request_id=str(number), source=source)
    outputs = collector.wait(120)
    return [outputs[str(number)].token_ids for number in range(len(prompts))]


def check_handed_over(
    source: Engine, domain: Engine, prompts: list[list[int]], params: SamplingParams
) -> None:
    """Compares the tokens after a hand-off of each prompt with those that the domain gives
    alone."""
    expected = layouts.one_by_one(domain, prompts, params)
    assert hand_over(source, domain, prompts, params) == expected
    check_counters(source, domain)


def check_counters(source: Engine, domain: Engine) -> None:
    """Checks that pages came over, that no transfer failed, and that nothing is left."""
    counters = domain.hand_offs.domains[0].client.counters
    assert counters.transfers > 0
    assert (counters.failures, counters.queued) == (0, 0)
    for engine in (source, domain):
        at_rest(engine)
        assert engine.compilations_after_ready == 0


def at_rest(engine: Engine) -> None:
    """Waits until nothing of any request is left, then checks the books."""
    scheduler, loop = engine.schedulers[0], engine._loop
    until(lambda: not scheduler.has_work and not engine.hand_offs.held)
    until(lambda: not (loop._page_actions or loop._imports or scheduler.fetches._fetches))
    scheduler.check_integrity()
    assert set(scheduler.kv_usage) == {0.0}

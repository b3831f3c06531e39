"""`python -m jaxserve.bench serve --url …`: load on a server that speaks OpenAI's completions.

Open loop (requests arrive at a Poisson rate or as in a trace) or closed loop (a fixed number in
flight); prompts and outputs of fixed lengths or with lengths like ShareGPT's conversations. Prints
and writes latencies (time to first token, between tokens, per output token, end to end),
throughput, and goodput: the requests that met all latency targets (SLA).
"""

import argparse
import asyncio
import functools
import itertools
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.bench.client import Client, Outcome, completion_body
from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    amount,
    count,
    describe_machine,
    percentile,
    publish,
)
from jaxserve.config.command_line import add_options
from jaxserve.errors import ConfigError
from jaxserve.planner import view
from jaxserve.planner.view import Series, chart

HELP = "load on a running server"
PERCENTILES = (50, 90, 95, 99)
SHAREGPT = ((4.6, 1.3), (5.0, 0.9))
"""Logarithm's mean and deviation of prompt and output lengths; medians of 100 and 150 tokens, long
tails. The shape of public conversation logs, not one of them."""


class Planned(NamedTuple):
    """A request: seconds after the start at which it is sent, and its lengths in tokens."""

    at: float
    prompt: int
    output: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--url", required=True, help="of the server, as in http://127.0.0.1:8000")
    parser.add_argument("--key", default="", help="API key")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=count, help="closed loop: requests at a time (8)")
    load.add_argument("--rate", type=amount, help="open loop: requests a second, Poisson")
    load.add_argument(
        "--trace", type=Path, help='open loop: lines {"at": s, "prompt": n, "output": n}'
    )
    readers = {"count": count, "amount": amount}
    add_options(parser, Path(__file__).with_suffix(".yaml"), readers)


def run(options: argparse.Namespace) -> int:
    """Sends the load, prints and writes the result; 1 if a request failed.

    Raises:
      ConfigError: an option is wrong.
    """
    sla = parse_sla(options.sla)
    if not 0 <= options.shared <= 1:
        raise ConfigError(f"--shared {options.shared:g}: expected 0 to 1")
    if options.vocab < 3:
        raise ConfigError(f"--vocab {options.vocab}: expected 3 or more")
    plan = list(planned(options))
    bodies = [body(request, options, number) for number, request in enumerate(plan)]
    outcomes: list[Outcome] = []

    def measured() -> Iterator[Part]:
        start = time.perf_counter()
        outcomes.extend(asyncio.run(_send(options, plan, bodies)))
        yield summary(outcomes, time.perf_counter() - start, sla)

    publish("serve", measured(), options, functools.partial(_write_page, options.html, outcomes))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in sorted(set(errors))[:5]:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if errors else 0


def planned(options: argparse.Namespace) -> Iterator[Planned]:
    """Yields the requests of the options; the same seed gives the same ones.

    Raises:
      ConfigError: an option is wrong.
    """
    if options.trace is not None:
        try:
            lines = options.trace.read_bytes().splitlines()
            for line in lines:
                one = msgspec.json.decode(line, type=dict[str, float])
                yield Planned(one["at"], int(one["prompt"]), int(one["output"]))
        except (OSError, msgspec.DecodeError, KeyError) as error:
            raise ConfigError(f"--trace {options.trace}: {error}") from None
        return
    source = random.Random(options.seed)
    at = 0.0
    for _ in range(options.requests):
        prompt, output = _lengths(options.lengths, options.longest, source)
        yield Planned(at if options.rate is not None else 0.0, prompt, output)
        if options.rate is not None:
            at += source.expovariate(options.rate)


def _lengths(words: str, longest: int, source: random.Random) -> tuple[int, int]:
    if words == "sharegpt":
        drawn = [round(source.lognormvariate(*shape)) for shape in SHAREGPT]
        prompt = min(max(4, drawn[0]), longest * 3 // 4)
        return prompt, min(max(4, drawn[1]), longest - prompt)
    if found := re.fullmatch(r"(\d+),(\d+)", words):
        return max(1, int(found[1])), max(1, int(found[2]))
    raise ConfigError(f"--lengths {words!r}: expected two numbers, as in 128,128, or sharegpt")


def parse_sla(text: str) -> dict[str, float]:
    """Parses `ttft=1,tpot=0.05` into seconds by name.

    Raises:
      ConfigError: the text has another form.
    """
    found = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--sla {item!r}: expected seconds, as in ttft=1") from None
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"--sla {item!r}: of ttft, tpot and e2e only")
    return found


def body(request: Planned, options: argparse.Namespace, number: int) -> bytes:
    """Encodes a request of random token ids; `--shared` is the part that all requests share."""
    shared = random.Random(options.seed)
    own = random.Random(f"{options.seed} {number}")
    common = round(request.prompt * options.shared)
    prompt = [shared.randrange(2, options.vocab) for _ in range(common)]
    prompt += [own.randrange(2, options.vocab) for _ in range(request.prompt - common)]
    return completion_body(prompt, request.output)


async def _send(
    options: argparse.Namespace, plan: Sequence[Planned], bodies: Sequence[bytes]
) -> list[Outcome]:
    client = Client(options.url, options.key, options.seconds)
    opened = options.rate is not None or options.trace is not None
    places = asyncio.Semaphore(len(plan) + 1 if opened else options.concurrency or 8)
    start = time.perf_counter()

    async def one(request: Planned, content: bytes) -> Outcome:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
        async with places:
            return await client.complete(content)

    try:
        return await asyncio.gather(*map(one, plan, bodies))
    finally:
        client.close()


class Latencies(NamedTuple):
    """Seconds: one entry a request, and in `itl` one a pair of tokens."""

    ttft: list[float]
    itl: list[float]
    tpot: list[float]
    e2e: list[float]


def latencies(outcomes: Sequence[Outcome]) -> Latencies:
    """Latencies of the requests that did not fail. A server may send several tokens in one event:
    TPOT spreads the time over all tokens, ITL is the time between events."""
    found = Latencies([], [], [], [])
    for outcome in outcomes:
        if outcome.error or not outcome.arrivals:
            continue
        first, last = outcome.arrivals[0], outcome.arrivals[-1]
        found.ttft.append(first)
        found.e2e.append(outcome.end)
        found.itl.extend(b - a for a, b in itertools.pairwise(outcome.arrivals))
        if outcome.tokens > 1:
            found.tpot.append((last - first) / (outcome.tokens - 1))
    return found


def meets(outcome: Outcome, sla: dict[str, float]) -> bool:
    """True if a request met every latency target."""
    times = latencies([outcome])
    measured = {"ttft": times.ttft, "tpot": times.tpot, "e2e": times.e2e}
    return bool(times.ttft) and all(
        max(measured[name], default=0.0) <= limit for name, limit in sla.items()
    )


def summary(outcomes: Sequence[Outcome], seconds: float, sla: dict[str, float]) -> Part:
    """Builds the report."""
    done = [outcome for outcome in outcomes if not outcome.error]
    tokens = sum(outcome.tokens for outcome in done)
    prompts = sum(outcome.prompt_tokens for outcome in done)
    measures = [
        Measure("requests", len(outcomes)),
        Measure("failed", len(outcomes) - len(done)),
        Measure("duration", seconds, "s"),
        Measure("requests", len(done) / seconds, "/s"),
        Measure("generated", tokens / seconds, "tokens/s"),
        Measure("prompts", prompts / seconds, "tokens/s"),
    ]
    for name, values in latencies(outcomes)._asdict().items():
        for percent in PERCENTILES if values else ():
            value = percentile(values, percent) * 1e3
            measures.append(Measure(f"{name} p{percent}", value, "ms"))
    if sla:
        good = sum(meets(outcome, sla) for outcome in outcomes)
        measures.append(Measure("goodput", good / seconds, "requests/s"))
        measures.append(Measure("met the SLA", 100 * good / max(1, len(outcomes)), "%"))
    details = {"outcomes": outcomes, "sla": sla}
    return Part("serve", "load on a server", measures, details=details)


def _write_page(file: Path | None, outcomes: Sequence[Outcome], report: Report) -> None:
    """Writes an HTML page with the numbers and the distributions."""
    if file is None:
        return
    rows = [[m.name, f"{m.value:.2f}", m.unit] for m in report.parts[0].measures]
    charts = []
    for name, values in latencies(outcomes)._asdict().items():
        if values:
            points = [(percentile(values, p) * 1e3, float(p)) for p in range(1, 101)]
            line = Series(name, points)
            charts.append(chart(f"{name}: percent that took at most", "ms", "%", [line]))
    where = describe_machine(report.machine)
    part = view.PagePart(where, [["", "value", "unit"], *rows], pictures=charts)
    try:
        file.write_text(view.Report("Load on a server", [part], None).page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror}") from None

"""`python -m jaxserve.bench serve --url …`: load on a server that speaks OpenAI's completions.

Open loop (requests arrive at a Poisson rate or as in a trace) or closed loop (a fixed number in
flight); prompts and outputs of fixed lengths or with lengths like ShareGPT's conversations. Prints
and writes latencies (time to first token, between tokens, per output token, end to end),
throughput, and goodput: the requests that met all latency targets (SLA).
"""

import argparse
import asyncio
import html
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.bench.client import Client, Outcome
from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    describe_machine,
    table,
    this_machine,
    write_json,
)
from jaxserve.errors import ConfigError
from jaxserve.planner.svg import Series, chart

PERCENTILES = (50, 90, 95, 99)
SHAREGPT = ((4.6, 1.3), (5.0, 0.9))
"""Logarithm's mean and deviation of prompt and output lengths; medians of 100 and 150 tokens, long
tails. The shape of public conversation logs, not one of them."""


class Planned(NamedTuple):
    """One request: when it is sent, in seconds after the start, and its lengths in tokens."""

    at: float
    prompt: int
    output: int


class TraceLine(msgspec.Struct):
    """A line of a trace file."""

    at: float
    prompt: int
    output: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--url", required=True, help="of the server, as in http://127.0.0.1:8000")
    parser.add_argument("--key", default="", help="API key")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, help="closed loop: so many at a time (8)")
    load.add_argument("--rate", type=float, help="open loop: requests a second, Poisson")
    load.add_argument(
        "--trace", type=Path, help='open loop: lines {"at": s, "prompt": n, "output": n}'
    )
    parser.add_argument("--requests", type=int, default=64, help="how many (64)")
    parser.add_argument(
        "--lengths", default="128,128", help="prompt and output in tokens, or sharegpt (128,128)"
    )
    parser.add_argument("--longest", type=int, default=1000, help="tokens of prompt and output")
    parser.add_argument("--vocab", type=int, default=1000, help="prompts are random ids below")
    parser.add_argument("--shared", type=float, default=0.0, help="shared part of prompts, 0 to 1")
    parser.add_argument("--sla", default="", help="as in ttft=1,tpot=0.05 (seconds)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one request (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")


def run(options: argparse.Namespace) -> int:
    """Sends the load, prints and writes what came back; 1 if a request failed.

    Raises:
      ConfigError: an option is wrong.
    """
    sla = parse_sla(options.sla)
    plan = list(planned(options))
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    bodies = [body(request, options, number) for number, request in enumerate(plan)]
    start = time.perf_counter()
    outcomes = asyncio.run(_send(options, plan, bodies))
    seconds = time.perf_counter() - start
    part = summary(outcomes, seconds, sla)
    print(table(part))
    report = Report("serve", False, machine, [part])
    if options.json is not None:
        write_json(options.json, report)
    if options.html is not None:
        options.html.write_text(page(part, outcomes, describe_machine(machine)), encoding="utf-8")
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in sorted(set(errors))[:5]:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if errors else 0


def planned(options: argparse.Namespace) -> Iterator[Planned]:
    """The requests of the options; the same seed gives the same ones.

    Raises:
      ConfigError: an option is wrong.
    """
    if options.trace is not None:
        try:
            lines = options.trace.read_bytes().splitlines()
            for line in lines:
                one = msgspec.json.decode(line, type=TraceLine)
                yield Planned(one.at, one.prompt, one.output)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--trace {options.trace}: {error}") from None
        return
    if options.rate is not None and not options.rate > 0:
        raise ConfigError(f"--rate {options.rate}: must be above 0")
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
    """`ttft=1,tpot=0.05` as seconds by name.

    Raises:
      ConfigError: it is none.
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
    """The request as JSON: random token ids, optionally with a prefix shared by all requests."""
    shared = random.Random(options.seed)
    own = random.Random(f"{options.seed} {number}")
    common = round(request.prompt * options.shared)
    prompt = [shared.randrange(2, options.vocab) for _ in range(common)]
    prompt += [own.randrange(2, options.vocab) for _ in range(request.prompt - common)]
    fields = {
        "prompt": prompt,
        "max_tokens": request.output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(fields)


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
    """Seconds, one a request; of the times between tokens one a pair."""

    ttft: list[float]
    itl: list[float]
    tpot: list[float]
    e2e: list[float]


def latencies(outcomes: Sequence[Outcome]) -> Latencies:
    """Of the requests that did not fail. A server may send several tokens in one event: TPOT
    spreads the time over all of them, ITL is the time between events."""
    found = Latencies([], [], [], [])
    for outcome in outcomes:
        if outcome.error or not outcome.arrivals:
            continue
        first, last = outcome.arrivals[0], outcome.arrivals[-1]
        found.ttft.append(first)
        found.e2e.append(outcome.end)
        found.itl.extend(
            b - a for a, b in zip(outcome.arrivals, outcome.arrivals[1:], strict=False)
        )
        if outcome.tokens > 1:
            found.tpot.append((last - first) / (outcome.tokens - 1))
    return found


def meets(outcome: Outcome, sla: dict[str, float]) -> bool:
    """Whether a request met every latency target."""
    times = latencies([outcome])
    measured = {"ttft": times.ttft, "tpot": times.tpot, "e2e": times.e2e}
    return bool(times.ttft) and all(
        max(measured[name], default=0.0) <= limit for name, limit in sla.items()
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed (nearest rank); nan of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summary(outcomes: Sequence[Outcome], seconds: float, sla: dict[str, float]) -> Part:
    """Everything in numbers."""
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


def page(part: Part, outcomes: Sequence[Outcome], where: str) -> str:
    """An HTML page with the numbers and the distributions."""
    rows = "".join(
        f"<tr><td>{html.escape(m.name)}<td align=right>{m.value:.2f}<td>{html.escape(m.unit)}"
        for m in part.measures
    )
    charts = []
    for name, values in latencies(outcomes)._asdict().items():
        if values:
            points = [(percentile(values, p) * 1e3, float(p)) for p in range(1, 101)]
            line = Series(name, points)
            charts.append(chart(f"{name}: how many percent took at most", "ms", "%", [line]))
    return (
        "<!doctype html><meta charset=utf-8><title>jaxserve bench serve</title>"
        f"<h1>Load on a server</h1><p>{html.escape(where)}<table>{rows}</table>{''.join(charts)}"
    )

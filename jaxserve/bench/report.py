"""Report of a benchmark: measures with targets, rounds in which ways take turns, the machine, a
table, a JSON file.

Used by all benchmarks and by `chaos/`; knows none of them and starts no JAX backend.
"""

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxserve.errors import ConfigError


class Measure(msgspec.Struct, frozen=True):
    """Named number, perhaps with a target."""

    name: str
    value: float
    unit: str = ""
    limit: float | None = None
    """Upper or lower limit of `value`; None: no target."""
    better: Literal["less", "more"] = "less"

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.better == "less" else self.value >= self.limit


class Part(msgspec.Struct, frozen=True):
    """Results of one part of a benchmark."""

    name: str
    title: str
    measures: list[Measure]
    notes: list[str] = []
    details: dict[str, Any] = {}
    """Further values worth keeping: settings, samples, percentiles."""


class Machine(msgspec.Struct, frozen=True):
    """Machine, versions and time of a measurement."""

    date: str
    system: str
    cpu: str
    cores: int
    """Cores this process may use."""
    load: float
    """Load average of the minute before the benchmark: other work on the machine."""
    python: str
    jax: str


class Report(msgspec.Struct, frozen=True):
    """Results of a whole benchmark."""

    bench: str
    quick: bool
    machine: Machine
    parts: list[Part]


def this_machine() -> Machine:
    """Describes this machine as of now."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        jax=importlib.metadata.version("jax"),
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_machine(machine: Machine) -> str:
    """Formats the machine as one line."""
    return (
        f"{machine.cpu}, {machine.cores} cores, load {machine.load:g}; {machine.system}; "
        f"Python {machine.python}, jax {machine.jax}; {machine.date}"
    )


def table(part: Part) -> str:
    """Formats the measures of a part as aligned lines, with targets and verdicts."""
    rows = [(m.name, f"{_number(m.value)} {m.unit}".rstrip(), _target(m)) for m in part.measures]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [part.title]
    for name, value, target in rows:
        lines.append(f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {target}".rstrip())
    lines += [f"  {note}" for note in part.notes]
    return "\n".join(lines)


def missed(parts: Sequence[Part]) -> list[str]:
    """Lists the measures that miss their target, as `part: measure`."""
    return [f"{part.name}: {m.name}" for part in parts for m in part.measures if m.met is False]


def _target(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    sign = "≤" if measure.better == "less" else "≥"
    return f"{sign} {measure.limit:g}  {'met' if measure.met else 'MISSED'}"


def _number(value: float) -> str:
    """Formats a number with three significant digits and no exponent."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3}f}"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `publish` reads: --json and --quick."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few rounds")


def publish(
    bench: str,
    measured: Iterable[Part],
    options: argparse.Namespace,
    page: Callable[[Report], None] = lambda report: None,
) -> int:
    """Prints the machine and each part as it is measured, writes the report to `--json`, and names
    the missed targets; 1 if any is missed.

    Args:
      measured: the parts; a generator measures each when it is asked for it.
      options: with `json`, and perhaps `quick`.
      page: writes a further form of the report.

    Raises:
      ConfigError: the file cannot be written; a missing folder is noticed before the first part.
    """
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {options.json}: no folder {options.json.parent}")
    machine, parts = this_machine(), []
    print(describe_machine(machine), flush=True)
    for part in measured:
        print(f"\n{table(part)}", flush=True)
        parts.append(part)
    report = Report(bench, getattr(options, "quick", False), machine, parts)
    page(report)
    if options.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        try:
            options.json.write_bytes(text)
        except OSError as error:
            raise ConfigError(f"--json {options.json}: {error.strerror}") from None
    if late := missed(parts):
        print(f"\nmissed: {', '.join(late)}", file=sys.stderr)
    return int(bool(late))


def take_turns[T](
    ways: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = 1
) -> dict[str, list[T]]:
    """Runs every way once a round, in an order drawn anew, so that other work on the machine
    affects all ways alike. Returns the results of the rounds after the first `warm_ups`."""
    draw, names = random.Random(0), list(ways)
    taken: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warm_ups, rounds):
        draw.shuffle(names)
        for name in names:
            result = ways[name]()
            if number >= 0:
                taken[name].append(result)
    return taken


def wall_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call, by the clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of single rounds, in which both were measured one after the other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the nearest-rank percentile of the values; nan without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def count(text: str) -> int:
    """Type of options that take a number of things: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 1 or more")
    return int(text)


def amount(text: str) -> float:
    """Type of options that take an amount: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number

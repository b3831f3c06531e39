"""The report of a bench: measures with targets, the machine, a table, a JSON file.

Used by all benches; knows none of them and starts no JAX backend.
"""

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


class Measure(msgspec.Struct, frozen=True):
    """One number."""

    name: str
    value: float
    unit: str = ""
    limit: float | None = None
    """Upper or lower limit of `value`; None: no target."""
    better: Literal["less", "more"] = "less"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.better == "less" else self.value >= self.limit


class Part(msgspec.Struct, frozen=True):
    """The results of one part of a bench."""

    name: str
    title: str
    measures: list[Measure]
    notes: list[str] = []
    details: dict[str, Any] = {}
    """Everything else worth keeping: settings, samples, percentiles."""


class Machine(msgspec.Struct, frozen=True):
    """Where and when it was measured."""

    date: str
    system: str
    cpu: str
    cores: int
    """Cores this process may use."""
    load: float
    """Load average of the last minute when the bench began: what else was running."""
    python: str
    jax: str
    jaxlib: str


class Report(msgspec.Struct, frozen=True):
    """A whole bench."""

    bench: str
    quick: bool
    machine: Machine
    parts: list[Part]


def this_machine() -> Machine:
    """The machine as it is now."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
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
    """One line."""
    return (
        f"{machine.cpu}, {machine.cores} cores, load {machine.load:g}; {machine.system}; "
        f"Python {machine.python}, jax {machine.jax}; {machine.date}"
    )


def table(part: Part) -> str:
    """The part's measures as aligned lines, with targets and verdicts where there are any."""
    rows = [(m.name, f"{_number(m.value)} {m.unit}".rstrip(), _target(m)) for m in part.measures]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [part.title]
    for name, value, target in rows:
        lines.append(f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {target}".rstrip())
    lines += [f"  {note}" for note in part.notes]
    return "\n".join(lines)


def write_json(path: Path, report: Report) -> None:
    """The whole report, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def missed(parts: Sequence[Part]) -> list[str]:
    """The measures that miss their target, as `part: measure`."""
    return [f"{part.name}: {m.name}" for part in parts for m in part.measures if m.met is False]


def _target(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    sign = "≤" if measure.better == "less" else "≥"
    return f"{sign} {measure.limit:g}  {'met' if measure.met else 'MISSED'}"


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3}f}"


def run_parts(
    name: str,
    parts: Mapping[str, Callable[[bool], Part]],
    chosen: Sequence[str],
    quick: bool,
    json_file: Path | None,
) -> int:
    """Measures the chosen parts one after the other and prints each; 1 if a target is missed."""
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    measured = []
    for key in chosen:
        part = parts[key](quick)
        print(f"\n{table(part)}", flush=True)
        measured.append(part)
    return conclude(Report(name, quick, machine, measured), json_file)


def conclude(report: Report, json_file: Path | None) -> int:
    """Writes the report, if it is wanted, and names the missed targets; 1 if there are any."""
    if json_file is not None:
        write_json(json_file, report)
    if late := missed(report.parts):
        print(f"\nmissed: {', '.join(late)}", file=sys.stderr)
    return int(bool(late))

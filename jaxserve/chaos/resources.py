"""Memory, file descriptors and threads of a deployment's processes: read from `/proc` during a
storm, and judged at its end.

Used by `storm.py`, which takes samples, and `figures.py`, which judges them.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from jaxserve.bench.report import Measure, Part
from jaxserve.chaos.deployment import Process

MATURE_SECONDS = 20.0
"""Age under which a process still loads, and is not compared."""
NEAR_SECONDS = 15.0
"""Samples of these last seconds up to an age stand for it."""
MORE_MEMORY, MORE_MEGABYTES = 0.05, 10.0
"""Growth that is allowed: this part of a process's memory (PSS) plus these MB, which allocators may
keep."""
MORE_FILES, MORE_THREADS = 4, 8
"""Connections that are just being made or ended; threads of pools that grow with use."""


class Sample(msgspec.Struct, frozen=True):
    """Memory, files and threads of a process at one moment.

    Attributes:
      age: of the process, seconds.
      memory: MB, its share of shared pages (PSS).
      resident: MB, with all shared pages (RSS).
      files: file descriptors.
      threads: number of threads.
    """

    age: float
    memory: float
    resident: float
    files: int
    threads: int


class ProcessLife(msgspec.Struct):
    """One process from its start to its end. A process started in its place has its own life.

    Attributes:
      pid: of the process.
      role, name: of `launched.Process`.
      samples: samples under load, in their order.
    """

    pid: int
    role: str
    name: str
    samples: list[Sample] = []


class Census:
    """Collects samples of all processes.

    Args:
      processes: returns the current processes.
    """

    def __init__(self, processes: Callable[[], Iterable[Process]]):
        self._processes = processes
        self._lives: dict[int, ProcessLife] = {}
        self.loads: list[float] = []
        """Load averages of the machine."""

    @property
    def lives(self) -> list[ProcessLife]:
        """Lives in the order of their first samples."""
        return list(self._lives.values())

    def take(self) -> None:
        """Adds a sample of each process to its life, and the load average of the machine."""
        self.loads.append(os.getloadavg()[0])
        for life in self.now():
            known = self._lives.setdefault(life.pid, ProcessLife(life.pid, life.role, life.name))
            known.samples += life.samples

    def now(self) -> list[ProcessLife]:
        """Returns one sample of each process."""
        found = []
        for process in self._processes():
            with contextlib.suppress(OSError, ValueError, KeyError):
                taken = sample(process.pid)
                found.append(ProcessLife(process.pid, process.role, process.name, [taken]))
        return found


def sample(pid: int) -> Sample:
    """Reads a sample of a process.

    Raises:
      OSError, ValueError, KeyError: it has ended.
    """
    folder = Path("/proc", f"{pid}")
    started = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
    shares = _kilobytes(folder / "smaps_rollup")
    status = _kilobytes(folder / "status")
    return Sample(
        age=time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"),
        memory=shares["Pss"] / 1024,
        resident=shares["Rss"] / 1024,
        files=len(list((folder / "fd").iterdir())),
        threads=status["Threads"],
    )


def _kilobytes(file: Path) -> dict[str, int]:
    """Name → number, of a file of lines `Name: number kB`."""
    words = (line.split() for line in file.read_text().splitlines())
    return {each[0].rstrip(":"): int(each[1]) for each in words if each[1:2] and each[1].isdigit()}


def held(
    before: Sequence[ProcessLife], after: Sequence[ProcessLife], lives: Sequence[ProcessLife]
) -> Part:
    """Compares samples. At rest, before the first fault and after the last one: of each process
    that lived on, and sums by role. Under load, at the same age: the first and the last process in
    a place."""
    measures = []
    for one in before:
        later = [life for life in after if life.pid == one.pid]
        if later:
            measures += _compared(
                f"{one.name}, lived on", [one.samples[-1]], [later[0].samples[-1]]
            )
    for role in sorted({life.role for life in before}):
        first, last = ([e.samples[-1] for e in all_ if e.role == role] for all_ in (before, after))
        measures += _compared(f"all of role {role}", first, last)
    for name in sorted({life.name for life in lives}):
        grown = [life for life in lives if life.name == name and _age(life) >= MATURE_SECONDS]
        if len(grown) > 1:
            age = min(_age(grown[0]), _age(grown[-1]))
            title = f"{name}, {len(grown)}th at {age:.0f} s"
            measures += _compared(title, [at_age(grown[0], age)], [at_age(grown[-1], age)])
    return Part("held", "what processes hold, afterwards (before)", measures)


def at_age(life: ProcessLife, age: float) -> Sample:
    """Medians of what a process held shortly before that age."""
    near = [taken for taken in life.samples if age - NEAR_SECONDS <= taken.age <= age]
    near = near or [min(life.samples, key=lambda taken: abs(taken.age - age))]
    return Sample(
        age=age,
        memory=statistics.median(taken.memory for taken in near),
        resident=statistics.median(taken.resident for taken in near),
        files=statistics.median_low(taken.files for taken in near),
        threads=statistics.median_low(taken.threads for taken in near),
    )


def _age(life: ProcessLife) -> float:
    return max((taken.age for taken in life.samples), default=0.0)


def _compared(name: str, before: Sequence[Sample], after: Sequence[Sample]) -> list[Measure]:
    """Memory has grown where both its measures have: what a process keeps is in both. The share
    alone (PSS) also grows when other processes no longer use the same pages, and the whole alone
    (RSS) when it touches pages that others have already."""
    count = max(1, len(before))
    was, now = (
        {field: sum(getattr(one, field) for one in samples) for field in Sample.__struct_fields__}
        for samples in (before, after)
    )
    grown = round(min(now[field] - was[field] for field in ("memory", "resident")), 1)
    limit = round(was["memory"] * MORE_MEMORY + MORE_MEGABYTES * count, 1)
    files, threads = was["files"], was["threads"]
    return [
        Measure(f"{name}: PSS ({was['memory']:.0f})", now["memory"], "MB"),
        Measure(f"{name}: RSS ({was['resident']:.0f})", now["resident"], "MB"),
        Measure(f"{name}: grown in both", grown, "MB", limit),
        Measure(f"{name}: files ({files})", now["files"], "", files + MORE_FILES * count),
        Measure(f"{name}: threads ({threads})", now["threads"], "", threads + MORE_THREADS * count),
    ]

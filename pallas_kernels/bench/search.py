"""The search for tile sizes: what to try next, what was tried, what to write.

Called by `tune.py`, which knows what a candidate costs. Varies one field at a time, until no
change of one is better.
"""

import datetime
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.tuned import as_size, table_path, write_entry

MARGIN = 0.02
"""Relative gain from which a candidate replaces an entry: timings are not exact."""

Sizes = dict[str, Any]


class OutOfTime(Exception):
    """The search has used up its time."""


class Settings(NamedTuple):
    """How to search.

    Attributes:
      trials: file of what was tried, a line of JSON each.
      tables: folder for the tables, by op; None: that of the package.
      candidate_seconds, seconds: the most time for a candidate at one size, and for everything.
      quick: tiny shapes and few candidates; tables are written only into a folder that is named.
    """

    trials: Path
    tables: Path | None
    candidate_seconds: float
    seconds: float
    quick: bool


class Found(NamedTuple):
    """The end of a search.

    Attributes:
      tiles: the best.
      before, after: cost of the previous tiles and of the best.
      finished: False if the time was up first.
    """

    tiles: Sizes
    before: float
    after: float
    finished: bool

    def better(self) -> bool:
        """Whether the best tiles are worth a change."""
        return self.finished and self.after < self.before * (1 - MARGIN)


def search(
    start: Sizes, choices: Mapping[str, Sequence[Any]], cost: Callable[[Sizes], float]
) -> Found:
    """Varies one field at a time until that changes nothing; `cost` may be infinite."""
    best, least = start, math.inf
    before = math.inf
    try:
        before = least = cost(start)
        changed = True
        while changed:
            changed = False
            for field, sizes in choices.items():
                for size in sizes:
                    candidate = best | {field: size}
                    if candidate != best and (found := cost(candidate)) < least * (1 - MARGIN):
                        best, least, changed = candidate, found, True
    except OutOfTime:
        return Found(best, before, least, finished=False)
    return Found(best, before, least, finished=True)


class Trials:
    """Tried candidates, in a file that only grows."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.known[self._key(entry["trial"])] = entry["result"]

    @staticmethod
    def _key(trial: Mapping[str, Any]) -> str:
        return json.dumps(trial, sort_keys=True)

    def get(self, trial: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result of a trial; runs it if it is new."""
        key = self._key(trial)
        if key not in self.known:
            self.known[key] = run()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"trial": trial, "result": self.known[key]}) + "\n")
        return self.known[key]


def report(
    call: str, entry: Mapping[str, Any], found: Found, device_kind: str, settings: Settings
) -> None:
    """Prints the result of a search, and writes it if it is better."""
    change = changes(found.tiles, to_sizes(entry["tiles"])) or "as it is"
    state = "" if found.finished else " (not finished)"
    print(f"{call}: {change}: {found.before:.4g} -> {found.after:.4g} s{state}", flush=True)
    if not found.better() or (settings.quick and settings.tables is None):
        return
    folder = settings.tables
    path = folder / f"{entry['op']}.json" if folder else table_path(entry["op"])
    about = {
        "tiles": changes(found.tiles, to_sizes(entry["default"])),
        "before": float(f"{found.before:.4g}"),
        "after": float(f"{found.after:.4g}"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": importlib.metadata.version("jax"),
    }
    write_entry(path, device_kind, call, about)


def changes(tiles: Sizes, start: Sizes) -> Sizes:
    """Returns the fields in which tiles differ."""
    return {field: size for field, size in tiles.items() if size != start[field]}


def map_sizes(sizes: Sequence[Any]) -> list[Any]:
    """Restores the types of tiles: JSON has lists for tuples."""
    return [as_size(size) for size in sizes]


def to_sizes(tiles: Mapping[str, Any]) -> Sizes:
    """Restores the types of all fields of tiles."""
    return {field: as_size(size) for field, size in tiles.items()}

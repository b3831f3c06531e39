"""Tile sizes found by a search: one table per op, by device kind and call.

Read by the ops' `tiles.py`, written by `python -m pallas_kernels.bench --tune`. `OP/tuned.json` is
`{device kind: {call: {"tiles": {field: size}, ...}}}`: the fields in which a call's tiles differ
from the device kind's default, and a record of how and when they were found. A call is named by the
kernel and the sizes that determine its tiles. Knows nothing of the meaning of the fields.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, cast

Fields = Mapping[str, Any]
"""Tile sizes by the names of their fields; fields may be missing."""


class Asked(NamedTuple):
    """A lookup of tiles by a kernel, as `recording()` notes it.

    Attributes:
      op: whose table it is in.
      default: the tiles without the table, as a dict.
      tiles: the tiles that the kernel was given.
      choices: for each field that may be tuned, the sizes to try.
    """

    op: str
    default: dict[str, Any]
    tiles: dict[str, Any]
    choices: Mapping[str, tuple[Any, ...]]


_forced: ContextVar[Mapping[str, Fields]] = ContextVar("pallas_kernels tiles")
_record: ContextVar[dict[str, Asked]] = ContextVar("pallas_kernels calls")


def table_path(op: str) -> Path:
    """Returns the path of an op's table."""
    return Path(__file__).parent / op / "tuned.json"


@functools.cache
def table(op: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns an op's table; empty without a file."""
    path = table_path(op)
    return json.loads(path.read_text()) if path.exists() else {}


def in_force[Tiles: tuple[Any, ...]](
    op: str,
    device_kind: str,
    call: str,
    default: Tiles,
    choices: Mapping[str, tuple[Any, ...]],
    given: Fields | None = None,
    settable: tuple[str, ...] = (),
) -> Tiles:
    """Returns the tiles of a call, a NamedTuple. Given fields come first, then those of
    `use_tiles`, the table's, and the default's.

    Args:
      given: fields from a caller of the op.
      settable: fields that a caller may give; empty: those of `choices`.

    Raises:
      ValueError: the table names a field that the tiles have not; or a given field is not one, or
        no size.
    """
    entry = table(op).get(device_kind, {}).get(call, {})
    fields = _forced.get({}).get(call, entry.get("tiles", {}))
    fields = {name: as_size(value) for name, value in fields.items()}
    known = default._asdict()  # type: ignore[attr-defined]  # of a NamedTuple
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(
            f"tiles of {op}, {device_kind}, {call}: no field {unknown[0]!r}; known: {list(known)}"
        )
    may = {name: known[name] for name in settable or choices}
    fields |= checked_fields(call.split()[0], given or {}, may)
    tiles = cast(Tiles, default._replace(**fields))  # type: ignore[attr-defined]
    with contextlib.suppress(LookupError):
        _record.get()[call] = Asked(op, known, known | fields, choices)
    return tiles


def checked_fields(op: str, given: Fields, known: dict[str, Any]) -> dict[str, Any]:
    """Returns fields from a caller as sizes.

    Raises:
      ValueError: `known` has no such field, or the value is of another kind than in `known`.
    """
    found = {name: as_size(value) for name, value in given.items()}
    for name, value in found.items():
        if name not in known:
            raise ValueError(f"tiles of {op}: no field {name!r}; known: {list(known)}")
        many = isinstance(known[name], tuple)
        sizes = value if isinstance(value, tuple) and many else (value,)
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            kind = "positive integers" if many else "a positive integer"
            raise ValueError(f"tiles of {op}: {name} is {value!r}, needs {kind}")
        if many and not isinstance(value, tuple):
            raise ValueError(f"tiles of {op}: {name} is {value!r}, needs a tuple of integers")
    return found


def require(fits: bool, op: str, field: str, value: Any, limits: str) -> None:
    """Refuses a tile size that a caller gave.

    Raises:
      ValueError: it does not fit.
    """
    if not fits:
        raise ValueError(f"tiles of {op}: {field} is {value}, needs {limits}")


def as_size(value: Any) -> Any:
    """Returns a size in the type that tiles have: JSON has lists for tuples."""
    return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def use_tiles(tiles: Mapping[str, Fields]) -> Iterator[None]:
    """Context in which traced calls use these fields, by call, instead of the table's."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Asked]]:
    """Context that collects the lookups of tiles inside, by call."""
    calls: dict[str, Asked] = {}
    token = _record.set(calls)
    try:
        yield calls
    finally:
        _record.reset(token)


def write_entry(path: Path, device_kind: str, call: str, entry: dict[str, Any]) -> None:
    """Puts an entry into a table's file, which is sorted."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault(device_kind, {})[call] = entry
    found = {kind: dict(sorted(calls.items())) for kind, calls in sorted(found.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    table.cache_clear()

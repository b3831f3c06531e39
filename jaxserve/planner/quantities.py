"""Quantities as people type them on the command line. Called by `plan.py`."""

import re
from collections.abc import Sequence
from typing import get_args

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.observe.spans import AFDStage
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.noise import Jitter


def seconds(text: str, option: str = "--tpot") -> float:
    """`50ms`, `200us`, `0.05s`; a bare number is milliseconds.

    Raises:
      ConfigError: it is something else, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|us|s|)\s*", text)
    try:
        value = float(match[1]) * {"s": 1.0, "us": 1e-6}.get(match[2], 1e-3) if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{option} {text!r}: expected a time above 0, as in 50ms")
    return value


def tokens(text: str, option: str = "--context") -> int:
    """`8192`, `8K` (8 × 1024).

    Raises:
      ConfigError: it is something else, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*([kK]?)\s*", text)
    value = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not 0 < value <= 2**24:
        raise ConfigError(f"{option} {text!r}: expected a number of tokens, as in 8192 or 8K")
    return value


def prices(items: Sequence[str]) -> dict[str, float]:
    """`h100=1.9`: USD a device and hour.

    Raises:
      ConfigError: no such pair, or a price not above 0.
    """
    found = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = 0.0
        if not name or not 0 < price < 1e6:
            raise ConfigError(f"--price {item!r}: expected name=USD an hour, as in h100=1.9")
        found[name.strip().lower()] = price
    return found


def jitter(items: Sequence[str], stall: str) -> Jitter:
    """`0.05` for every stage, `combine=0.3` for one; a stall as `0.001:1ms`, or with the exponent
    of a heavy tail, as `0.001:1ms:1.5`.

    Raises:
      ConfigError: an unknown stage, a spread that is not in [0, 10], or no such stall.
    """
    spread: dict[AFDStage, float] = {}
    names = get_args(AFDStage)
    for item in items:
        name, equals, text = item.rpartition("=")
        value = _number(text)
        if (equals and name not in names) or value is None or not 0 <= value <= 10:
            raise ConfigError(
                f"--jitter {item!r}: expected a spread from 0 to 10, of all stages or of one of "
                f"{', '.join(names)}, as in 0.05 or combine=0.3"
            )
        for stage in (name,) if equals else names:
            spread[stage] = value
    if not stall:
        return Jitter(spread=spread)
    probability, colon, duration = stall.partition(":")
    duration, more, tail = duration.partition(":")
    chance, exponent = _number(probability), _number(tail) if more else 0.0
    if not colon or chance is None or not 0 <= chance <= 1:
        raise ConfigError(f"--stall {stall!r}: expected probability:time, as in 0.001:1ms")
    if exponent is None or (more and not 0.5 <= exponent <= 100):
        raise ConfigError(f"--stall {stall!r}: expected an exponent from 0.5 to 100, as in 1.5")
    return Jitter(
        spread=spread,
        stall_probability=chance,
        stall_seconds=seconds(duration, "--stall"),
        stall_exponent=exponent,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


PAPER = Assumptions(
    overlap=1.0,
    broadcast=True,
    host_seconds=0.0,
    host_device_seconds=0.0,
    plan_seconds=0.0,
    plan_below_seconds=0.0,
)
"""How Step-3's own system moves rows (§7.1)."""

PUBLISHED = msgspec.structs.replace(
    PAPER, alltoall=True, overlapped=True, whole_dense=True, replicas=True
)
"""AFD as Step-3's system, colocated EP as DeepSeek's and SGLang's: each at its published best."""


def assumptions(items: Sequence[str]) -> Assumptions:
    """`compute=0.8`, `broadcast=true`; `paper` stands for how Step-3's system moves rows,
    `published` for that and for two overlapping batches of colocated EP.

    Raises:
      ConfigError: an unknown name (lists the known ones) or a value out of range.
    """
    named = {"paper": PAPER, "published": PUBLISHED}
    chosen = [named[item] for item in items if item in named]
    tree = msgspec.to_builtins(chosen[-1] if chosen else Assumptions())
    for item in items:
        name, equals, text = item.partition("=")
        if item in named:
            continue
        if not equals or name not in tree:
            raise ConfigError(
                f"--assume {item!r}: expected one of {', '.join(tree)}, as in compute=0.8"
            )
        tree[name] = text
    try:
        found = msgspec.convert(tree, Assumptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--assume: {error}") from None
    wrong = [
        f"{name} = {getattr(found, name)} (from {low} to {high})"
        for name, (low, high) in _RANGES.items()
        if not low <= getattr(found, name) <= high
    ]
    if wrong:
        raise ConfigError(f"--assume: out of range: {'; '.join(wrong)}")
    return found


_RANGES = {
    "compute": (0.01, 1.0),
    "memory": (0.01, 1.0),
    "network": (0.01, 1.0),
    "stage_seconds": (0.0, 1.0),
    "crossing_seconds": (0.0, 1.0),
    "collective_seconds": (0.0, 1.0),
    "hop_seconds": (0.0, 1.0),
    "host_seconds": (0.0, 1.0),
    "host_device_seconds": (0.0, 1.0),
    "plan_seconds": (0.0, 1.0),
    "plan_below_seconds": (0.0, 1.0),
    "imbalance": (0.0, 100.0),
    "overlap": (0.0, 1.0),
    "reserve": (0.0, 0.9),
}

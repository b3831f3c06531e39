"""The file of a preflight: outcomes, and every measured time in the form that the planner reads.

`measurements` is for `plan … --calibration` and `plan calibrate --measured`, `spans` for
`plan calibrate --timeline` and `plan verify --timeline`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve import plan
from jaxserve.bench.report import this_machine
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.observe.merging import merge
from jaxserve.observe.spans import Span
from jaxserve.planner.comparison import measurements, observed
from jaxserve.planner.hardware import known_hardware, load_hardware, unknown
from jaxserve.preflight.outcomes import Outcome

FOLDER = Path("measured")


def device_kind(outcomes: Sequence[Outcome]) -> str:
    """The kind of the first process's devices, as JAX names it."""
    found = [one.details.get("kind", "") for one in outcomes]
    return next((kind for kind in found if kind), "unknown")


def default_path(outcomes: Sequence[Outcome]) -> Path:
    """`measured/DEVICE-DATE.json`."""
    kind = re.sub(r"[^a-z0-9]+", "-", device_kind(outcomes).lower()).strip("-")
    return FOLDER / f"{kind}-{this_machine().date[:10]}.json"


def record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the file's tree. `planned` adds the stages of recorded steps later."""
    measurements: list[Any] = []
    checks = []
    for one in outcomes:
        details = dict(one.details)
        details.pop("spans", None)
        measurements += details.pop("measurements", [])
        checks.append({**msgspec.to_builtins(one), "details": details})
    return {
        "device_kind": device_kind(outcomes),
        "machine": msgspec.to_builtins(this_machine()),
        "checks": checks,
        "measurements": measurements,
        "spans": msgspec.to_builtins(spans_of(outcomes)),
    }


def spans_of(outcomes: Sequence[Outcome]) -> list[Span]:
    """The stages of decoding that all processes recorded, in the time of process 0."""
    ahead = {one.process: one.details.get("ahead", 0.0) for one in outcomes if one.name == "clock"}
    return merge(
        [
            _shifted(span, round(ahead.get(one.process, 0.0) * 1e9))
            for span in msgspec.convert(one.details["spans"], list[Span])
        ]
        for one in outcomes
        if one.name in ("steps", "domain steps") and "spans" in one.details
    )


def planned(path: Path, words: Sequence[str], kind: str) -> list[dict[str, Any]]:
    """The stages of a file's spans as measurements, as `plan calibrate --timeline` makes them.

    Args:
      path: a written record.
      words: options that name the deployment.
      kind: of the devices, as JAX names it.

    Raises:
      ConfigError: no hardware file knows the devices, or the spans are not of the whole model.
    """
    names = known_hardware()
    known = [name for name in names if kind in load_hardware(name, None, CONFIGS).device_kinds]
    if not known:
        raise ConfigError(unknown("hardware", kind, names))
    given = ["calibrate", *words, "--hardware", known[0], "--timeline", str(path)]
    made, seen = observed(plan.parser().parse_args(given))
    return [dict(msgspec.to_builtins(one)) for one in measurements(made, seen)]


def _shifted(span: Span, nanoseconds: int) -> Span:
    """A span in the time of process 0."""
    return msgspec.structs.replace(
        span,
        start_ns=span.start_ns + nanoseconds,
        end_ns=span.end_ns + nanoseconds,
        enqueued_ns=span.enqueued_ns + nanoseconds,
    )


def write(path: Path, tree: dict[str, Any]) -> None:
    """Writes a record, readable line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(tree), indent=1)
    path.write_bytes(text + b"\n")

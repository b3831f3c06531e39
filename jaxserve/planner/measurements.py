"""Measured stages: their file, and the calibration that follows from it.

Called by `plan.py calibrate`, and by every command that takes `--calibration`. A file is a JSON
list of `Measurement`s, as `python -m pallas_kernels.bench --layer --json` writes it; `calibrate`
collects several into one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.observe.timeline import AFDStage, Span, steady_window
from jaxserve.planner.calibration import NOTHING, Calibration, fit
from jaxserve.planner.hardware import Hardware, known_hardware, load_hardware, unknown
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import load_model
from jaxserve.planner.search import crossings
from jaxserve.planner.stages import Assumptions, Calculator, Format, Formats


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one stage of one layer."""

    device_kind: str
    """As JAX names it ("TPU v6 lite", "NVIDIA H200"), or a hardware file's name."""
    op: AFDStage
    model: str
    """A known model, or a model folder."""
    batch: int
    """Sequences a DP group."""
    context: int
    """Tokens of a sequence."""
    format: Format
    """Number format of weights and cache."""
    seconds: float
    cache: Format | None = None
    """Number format of the cache, if it differs."""
    dispatch: Format = "bfloat16"
    compute: str = "auto"
    """Format of matrix products (`Formats.compute`)."""
    dp: int = 1
    tp: int = 1
    ep: int = 1
    ffn_tp: int = 1
    """DP groups × tp devices, ep × ffn_tp devices: ffn, dispatch and combine depend on all."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies what was measured; a later measurement with the same key replaces this one."""
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "seconds")


def read_measurements(path: Path) -> list[Measurement]:
    """Reads a file of measurements.

    Raises:
      ConfigError: the file is missing or malformed, or a number is out of range.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Measurement])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for index, one in enumerate(found):
        for name in ("seconds", "batch", "context", "dp", "tp", "ep", "ffn_tp"):
            if not 0 < getattr(one, name) < 1e9:
                raise ConfigError(f"{path}: [{index}].{name} = {getattr(one, name)} is not above 0")
    return found


def joined(lists: Iterable[Iterable[Measurement]]) -> list[Measurement]:
    """Joins lists of measurements; later ones replace earlier ones with the same key."""
    return list({one.key: one for found in lists for one in found}.values())


def predicted(one: Measurement, configs: Path = CONFIGS) -> tuple[Hardware, float]:
    """The hardware of a measurement, and the seconds that rooflines alone predict. For an ffn stage
    only its computation counts: a benchmark of one device has no collectives.

    Raises:
      ConfigError: its hardware or model is unknown.
    """
    hardware = hardware_of(one.device_kind, configs)
    formats = Formats(
        weights=one.format,
        cache=one.cache or one.format,
        dispatch=one.dispatch,
        compute=one.compute,  # type: ignore[arg-type]
    )
    model = load_model(one.model, configs)
    calculator = Calculator(model, one.context, formats, Assumptions())
    if one.op == "attend":
        group = max(model.attention, key=lambda group: group.layers)
        return hardware, calculator.attend(group, hardware, one.batch, one.tp).seconds
    layout = Layout(
        mode="afd",
        attention=one.device_kind,
        ffn=one.device_kind,
        dp=one.dp,
        tp=one.tp,
        ep=one.ep,
        ffn_tp=one.ffn_tp,
        lanes=1,
    )
    if one.op == "ffn":
        group_of_ffn = max(model.ffn, key=lambda group: group.layers)
        parts = calculator.ffn(group_of_ffn, hardware, one.dp * one.batch, layout.ffn_mesh)
        return hardware, parts.work.seconds
    there, back = crossings(calculator, layout, hardware, hardware, one.batch)
    return hardware, (there if one.op == "dispatch" else back).seconds


def hardware_of(device_kind: str, configs: Path = CONFIGS) -> Hardware:
    """The hardware with this name or with this JAX device kind.

    Raises:
      ConfigError: it is unknown; the message lists the known ones.
    """
    names = known_hardware(configs)
    if device_kind.lower() in names:
        return load_hardware(device_kind, None, configs)
    for name in names:
        hardware = load_hardware(name, None, configs)
        if device_kind in hardware.device_kinds:
            return hardware
    raise ConfigError(unknown("hardware", device_kind, names))


def calibration(found: Sequence[Measurement], configs: Path = CONFIGS) -> Calibration:
    """A fit for each stage and hardware that was measured."""
    points: dict[tuple[AFDStage, str], list[tuple[float, float]]] = {}
    for one in found:
        hardware, seconds = predicted(one, configs)
        points.setdefault((one.op, hardware.name), []).append((seconds, one.seconds))
    return Calibration({key: fit(values) for key, values in points.items()})


def read_calibration(path: Path | None, configs: Path = CONFIGS) -> Calibration:
    """The calibration from a file of measurements; without a file, no correction.

    Raises:
      ConfigError: see `read_measurements` and `predicted`.
    """
    return NOTHING if path is None else calibration(read_measurements(path), configs)


class _Trace(msgspec.Struct):
    """The part of timeline.json that is used here."""

    spans: list[Span]


def read_spans(path: Path) -> list[Span]:
    """The spans of a `--timeline` folder, or of its timeline.json.

    Raises:
      ConfigError: there are none.
    """
    file = path / "timeline.json" if path.is_dir() else path
    try:
        spans = msgspec.json.decode(file.read_bytes(), type=_Trace).spans
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not spans:
        raise ConfigError(f"{file}: no spans")
    return spans


def steady_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans that end in a typical window of steps, without compilations and pauses."""
    steps = len({span.step for span in spans})
    begin, end = steady_window(spans, max(1, steps // 4))
    return [span for span in spans if begin < span.end_ns <= end]

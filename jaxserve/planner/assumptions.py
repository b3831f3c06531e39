"""Assumptions of a prediction: number formats, constants that correct rooflines, and the measured
speed of published systems relative to their predictions.

Called by `stages.py`, and by modules that read or make them.
"""

import functools
import math
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jaxserve.config.formats import FORMATS, FormatName, scaled
from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import HOSTS_EACH, TRANSPORTS, PlannedMode
from jaxserve.planner.calibration import MeasuredStage
from jaxserve.planner.hardware import Hardware, read_struct

PLANNED: tuple[FormatName, ...] = ("bfloat16", "fp8", "int8")
"""Formats that are planned for everything; 4 bits are for weights alone, in files that say so."""


def number_bytes(name: str) -> int:
    """Returns the bytes of a number in a format of 8 bits or more, scales left out."""
    return FORMATS[name].bits // 8


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats for storage, transfer and computation."""

    weights: FormatName = "fp8"
    group: int = 128
    """Number of INT4 weights that share a scale."""
    zero_points: bool = False
    """Whether a group of INT4 weights shares a zero point, too."""
    cache: FormatName = "fp8"
    dispatch: FormatName = "fp8"
    rope: Literal["auto", "bfloat16"] = "auto"
    """Format of the rotated part of 8-bit latents; `auto`: as `cache`."""
    compute: Literal["auto", "bfloat16", "fp8", "int8"] = "auto"
    """Format of matrix products. `auto`: as in the engine, INT8 for INT8 weights and BF16 for all
    others and for attention (FP32, where that is the dtype), but for routed experts, see `experts`.
    Otherwise all products use this format, as in the paper's FP8."""
    expert_rows: Literal["auto", "blocks", "float"] = "auto"
    """`ffn.expert_rows` of the deployment."""
    core: Literal["auto", "bfloat16", "fp8", "int8"] = "auto"
    """Format of attention's own products, if not as `compute`: DeepSeek attends in BF16."""
    rows: Literal["bfloat16", "float32"] = "bfloat16"
    """The deployment's `dtype`: of rows, routers and the per-head maps of latent attention."""
    held: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of embedding and head: on CPUs that of the checkpoint; `auto`: as `rows`."""
    output: int = 1
    """DP groups that divide the output projection among them (`attention.output: split`)."""
    combine: Literal["auto", "int8"] = "auto"
    """Format of the FFN's results on their way back; `auto`: as `rows`."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter, in 4 bits with its part of its group's scale."""
        one = FORMATS[self.weights]
        if one.scales.get("weights") == "group":
            zero_points = self.zero_points and not one.group
            return one.bits / 8 + (one.scale_bytes + zero_points) / (one.group or self.group)
        return number_bytes(self.weights)

    @property
    def table(self) -> Literal["bfloat16", "float32"]:
        """Format of embedding and head."""
        return self.rows if self.held == "auto" else self.held

    @property
    def linear(self) -> str:
        """Format of products with weights."""
        if self.compute != "auto":
            return self.compute
        return "int8" if self.weights == "int8" else self.rows

    def experts(self, hardware: Hardware) -> str:
        """Format of products with routed experts' weights: on Hopper FP8 ones are multiplied by
        rows in FP8, unless the deployment says otherwise
        (`pallas_kernels/grouped_matmul/api.py: fastest_row_format`)."""
        if self.compute != "auto" or not scaled(self.weights):
            return self.linear
        if self.expert_rows == "float":
            return self.rows
        if self.expert_rows == "blocks":
            return FORMATS[self.weights].products
        fastest = self.weights == "fp8" and hardware.is_hopper and self.rows != "float32"
        return "fp8" if fastest else self.linear

    @property
    def attention(self) -> str:
        """Format of attention's products."""
        chosen = self.compute if self.core == "auto" else self.core
        return self.rows if chosen == "auto" else chosen

    def of(self, stage: MeasuredStage) -> str:
        """Names the fit of a stage by the formats that matter to it."""
        match stage:
            case "attend" | "enter":
                return f"{self.weights}, cache {self.cache}, products {self.attention}"
            case "ffn":
                return f"{self.weights}, products {self.linear}"
            case "dispatch":
                return self.dispatch
            case "combine":
                return self.rows if self.combine == "auto" else self.combine
            case "leave" if self.table != self.rows:
                return f"{self.table}, products {self.rows}"
        return self.rows


NCCL_HOST = 290e-6
"""Most host seconds of a layer and lane on GPUs by what is published: two NCCL batches of 88 µs
(openxla/xla #35113) and the launches around them take 190 to 290 µs."""
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1)]
Peak = Annotated[float, Meta(ge=0.01, le=1)]
"""Share of what hardware could do."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Constants that correct rooflines towards measured times; `commands.yaml` says what each is.

    Compute, memory and stage_seconds are fitted to Step-3's layers in its table 9, which come out
    within 17 % on H800, H20 and A800; the other models' there, to which nothing is fitted, within
    26 %. The network's share is what §5.4 reports of DeepEP. The others are guesses.
    """

    compute: Peak = 0.7
    memory: Peak = 0.9
    network: Peak = 0.8
    stage_seconds: Seconds = 50e-6
    crossing_seconds: Seconds = 20e-6
    pull_seconds: Seconds = 70e-6
    pull_gb_s: Annotated[float, Meta(ge=0, le=1000)] = TRANSPORTS["pull"].gb_per_second
    collective_seconds: Seconds = 10e-6
    hop_seconds: Seconds = 1e-6
    host_seconds: Seconds = 3e-6
    host_device_seconds: Seconds = 10e-6
    host_gpu_seconds: Seconds = 115e-6
    plan_seconds: Seconds = 140e-6
    plan_below_seconds: Seconds = 14e-6
    request_seconds: Seconds = 10e-3
    imbalance: Annotated[float, Meta(ge=0, le=100)] = 0.0
    replicas: bool = False
    overlap: Share = 0.0
    broadcast: bool = False
    whole_dense: bool = False
    alltoall: bool = False
    overlapped: bool = False
    expanded: bool = False
    reserve: Annotated[float, Meta(ge=0, le=0.9)] = 0.1

    def at(self, speed: float) -> "Assumptions":
        """Returns the constants of hardware and hosts that have a part of this speed."""
        shares = ("compute", "memory", "network", "pull_gb_s")
        seconds = [name for name in self.__struct_fields__ if name.endswith("_seconds")]
        changed = {name: speed * getattr(self, name) for name in shares}
        changed |= {name: getattr(self, name) / speed for name in seconds}
        return msgspec.structs.replace(self, **changed)

    def host(self, on: tuple[Hardware, Hardware], devices: tuple[int, int], layers: int) -> float:
        """Returns the host seconds of the busiest process for a layer and lane, with a call a stage
        and layer, on the hardware and devices of the attention and the ffn role. The process that
        leads also sends a step's plan to the others of its host and, once each, to a few other
        hosts (`fleet/below.py`)."""
        first, everywhere, of_role = on[0], sum(devices), []
        for hardware, count in zip(on, devices, strict=True):
            here = min(count, hardware.process_devices)
            device = self.host_device_seconds
            device += self.host_gpu_seconds * (hardware.platform == "gpu")
            of_role.append(self.host_seconds + here * device)
        neighbours = math.ceil(min(everywhere, first.devices_per_host) / first.process_devices) - 1
        hosts = math.ceil(everywhere / first.devices_per_host)
        if below := neighbours + min(hosts - 1, HOSTS_EACH):
            of_role[0] += (self.plan_seconds + below * self.plan_below_seconds) / layers
        return max(of_role)

    @property
    def beyond_engine(self) -> list[str]:
        """Names of what is assumed of other systems, which this engine does not do."""
        names = ("broadcast", "whole_dense", "expanded")
        found = [name for name in names if getattr(self, name)]
        return [*found, f"overlap={self.overlap:g}"] if self.overlap else found


class SpeedRange(NamedTuple):
    """Percentiles of the speed of whole systems that others measured, over the predicted speed."""

    systems: int
    p10: float
    p50: float
    p90: float

    @property
    def text(self) -> str:
        return (
            f"{self.systems} measured systems reached {self.p10:.2f} to {self.p90:.2f} of their "
            f"predicted speed (p10 to p90, median {self.p50:.2f}; docs/measurements/planner.md)"
        )


class MeasuredSpeed(NamedTuple):
    """Ranges of all published systems together, and of those of each mode."""

    systems: SpeedRange
    modes: dict[PlannedMode, SpeedRange]


@functools.cache
def measured_speed() -> MeasuredSpeed:
    """Returns the ranges that `tests/jaxserve/planner/published.py` writes and a test compares."""
    return read_struct(CONFIGS / "measured_speed.json", MeasuredSpeed, json=True)

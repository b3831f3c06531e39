"""Assumptions behind the estimates, each with its source: the only place for such numbers.

Read by `model.py` and the planner's `estimate.py`. `python -m pallas_kernels.estimate
--assumptions` prints them. This project measured none of them on a GPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

from pallas_kernels.estimate.sass import Latencies


class Assumption(NamedTuple):
    """A number, its unit and its source."""

    value: float
    unit: str
    source: str


_DISSECTED = "arXiv 2402.13499 (microbenchmarks of H100)"
_MEASURED = "CPU devices (docs/measurements/serving.md)"
_PLANS = "CPU of all its threads, 2026-11-22, load 11 to 25"
_GUIDE = "CUDA programming guide, throughput of instructions, compute capability 9.0"

ASSUMPTIONS = {
    "h200.hertz": Assumption(1.755e9, "1/s", "clock of an H100 SXM under load; a guess for H200"),
    "h200.memory": Assumption(
        4.3e12, "B/s", "a copy on H200 as published by users; 4.8e12 nominal"
    ),
    "h200.multiprocessors": Assumption(132, "", "NVIDIA H100 white paper"),
    "h200.flops_a_cycle": Assumption(
        4096, "FLOP/cycle", "of a multiprocessor, 16 bits: 989 TFLOP/s at 1.83 GHz (data sheet)"
    ),
    "h200.l2": Assumption(27, "B/cycle", "of a multiprocessor from the L2 cache, by " + _DISSECTED),
    "h200.attention": Assumption(
        660e12,
        "FLOP/s",
        "most that a published attention kernel reaches: FlashMLA, BF16 decode, H800 SXM5 "
        "(github.com/deepseek-ai/FlashMLA)",
    ),
    "h200.node": Assumption(1.7e-6, "s", "a kernel behind another one, beside its bytes; a guess"),
    "h200.sort": Assumption(
        11e-6, "s", "sort_choices of a step's choices, launch included: 7.6 to 11 by machine code"
    ),
    "h200.link": Assumption(450e9, "B/s", "NVLink one way, data sheet"),
    "h200.network": Assumption(50e9, "B/s", "of a GPU: 400 Gbit/s NIC, DGX H200 data sheet"),
    "h200.host_devices": Assumption(8, "", "GPUs of a host, DGX H200 data sheet"),
    "h200.collective": Assumption(10e-6, "s", "latency of a collective, as the planner has it"),
    "h200.contention": Assumption(
        63e-6,
        "s",
        "that a message waits for attention's grid of 132 blocks, one a multiprocessor: NCCL's "
        "kernel starts with a second wave, by count; charged in the adverse case alone",
    ),
    "h200.collective_multiprocessors": Assumption(
        24,
        "",
        "that NCCL's kernel keeps from others, on H100: forums.developer.nvidia.com/t/339078; what "
        "needs all 132 at once would take twice its time, which is not charged",
    ),
    "host.python": Assumption(3e-6, "s", "the driver's own, a layer; " + _MEASURED),
    "host.call": Assumption(4.2e-6, "s", "a program that does nothing, one device; " + _MEASURED),
    "host.call_device": Assumption(
        6.7e-6, "s", "and for each more of the process: 51 µs with 8; " + _MEASURED
    ),
    "host.argument": Assumption(
        0.6e-6, "s", "of a program's call, 8 to 32 µs with 1 to 40 of them; CPU devices, load 15"
    ),
    "host.argument_device": Assumption(
        0.07e-6, "s", "and for each more of the process: 1.1 µs with 8; CPU devices, load 15"
    ),
    "host.message": Assumption(
        21e-6, "s", "and its answer, 16A16F, processes of one device; " + _MEASURED
    ),
    "host.message_device": Assumption(
        4.4e-6, "s", "and for each more of the process: 52 µs with 8; " + _MEASURED
    ),
    "host.launch": Assumption(
        3e-6,
        "s",
        "of a kernel, by XLA and the driver, without CUDA graphs; 3.8 between two launches in "
        "NVIDIA's Getting Started with CUDA Graphs (V100); a guess",
    ),
    "host.plan": Assumption(
        140e-6, "s", "of the leading process, for a step's plan of 2,048 rows; " + _PLANS
    ),
    "host.plan_below": Assumption(
        14e-6, "s", "and for each process or host that it sends it to; " + _PLANS
    ),
    "host.hosts_each": Assumption(8, "", "to which a process hands plans on: fleet/broadcast.py"),
    "tpu.descriptor": Assumption(5e-9, "s", "between two DMAs of a core: ten cycles; a guess"),
}

LATENCIES = Latencies(
    wgmma_columns=0.5,  # 64 x N x 16 of 16 bits, or x 32 of 8: 2048 N FLOP of 4096 a cycle
    wgmma_left=16,  # 64 x 32 bytes at 128 bytes a cycle
    wgmma_right=0.25,  # 32 bytes a column
    result={
        "LDS": 29,
        "LDG": 262,
        "LD.": 262,
        "ATOM": 262,
        "MUFU": 18,
        "SHFL": 24,
        "LDC": 30,
        "LDSM": 33,
    },
    operands=12,
    pipes={
        "FADD": ("fma", 1),
        "FMUL": ("fma", 1),
        "FFMA": ("fma", 1),
        "HFMA2": ("fma", 1),
        "HMUL2": ("fma", 1),
        "HADD2": ("fma", 1),
        "IMAD": ("fma", 2),
        "MUFU": ("xu", 8),
        "F2F": ("xu", 8),
        "F2FP": ("alu", 2),
        "I2F": ("xu", 8),
        "F2I": ("xu", 8),
        "LDS": ("lsu", 4),
        "LDSM": ("lsu", 4),
        "STS": ("lsu", 4),
        "STSM": ("lsu", 4),
        "SYNCS": ("lsu", 2),
        "U": ("uniform", 2),
        "HGMMA": ("issue", 1),
        "QGMMA": ("issue", 1),
        "IGMMA": ("issue", 1),
        "WARPGROUP": ("issue", 1),
        "BAR": ("issue", 1),
        "BRA": ("issue", 1),
        "NOP": ("issue", 1),
    },
)
"""Cycles. Results by arXiv 2402.13499. Units of a scheduler by the programming guide's throughputs
(a warp of 32 over a quarter of a multiprocessor's). Other instructions take two cycles of the
integer unit, and 20 until their result is available if they have a scoreboard."""

SOURCES = (_DISSECTED, _GUIDE)


PUBLISHED: Mapping[str, float] = {
    "h200.node": 3e-6,
    "h200.sort": 7.6e-6,
    "h200.collective": 15e-6,
    "host.message": 60e-6,
}
"""Fastest values that others published or that machine code allows, where the ones above are
guesses: launches of dependent small kernels, NCCL's and DeepEP's small collectives, the host's
part of a message (one NCCL batch took 88 µs of the host, openxla/xla #35113)."""

ADVERSE: Mapping[str, float] = {
    "h200.node": 3e-6,
    "h200.collective": 20e-6,
    "host.message": 100e-6,
}
"""Slowest values expected of the same costs."""

_INSTEAD: ContextVar[Mapping[str, float]] = ContextVar("assumptions", default=MappingProxyType({}))


@contextmanager
def assuming(values: Mapping[str, float]) -> Iterator[None]:
    """Replaces assumptions inside a `with` block."""
    token = _INSTEAD.set({**_INSTEAD.get(), **values})
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def assumed(name: str) -> float:
    """Returns the value of an assumption, or its replacement inside `assuming`."""
    return _INSTEAD.get().get(name, ASSUMPTIONS[name].value)

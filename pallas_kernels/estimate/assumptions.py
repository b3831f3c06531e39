"""Assumptions behind the estimates, each with its source: the only place for such numbers.

Read by `model.py` and the planner's `estimate.py`. `python -m pallas_kernels.estimate
--assumptions` prints them. This project measured none of them on a GPU.
"""

from typing import NamedTuple

from pallas_kernels.estimate.sass import Latencies


class Assumption(NamedTuple):
    """A number, its unit and its source."""

    value: float
    unit: str
    source: str


_DISSECTED = "arXiv 2402.13499 (microbenchmarks of H100)"
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


def assumed(name: str) -> float:
    """Returns the value of an assumption."""
    return ASSUMPTIONS[name].value

"""What programs are compiled with beyond XLA's own defaults, and why: the one place that says it.

A flag that XLA_FLAGS names keeps that value in all programs on GPUs.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

CudaGraphs = Literal["default", "off", "branches"]
"""Whether XLA turns consecutive kernels of a program into command buffers, which are CUDA graphs. A
graph keeps the addresses of its kernels' arguments. At a call with other addresses XLA records
every node again and traces custom calls, our kernels, once more (it keeps 16 graphs of those).

`default`: XLA decides.

`off`: for programs that a step runs once a layer. One executable serves all layers, so weights,
pages and messages have other addresses at every call, and no graph would be used twice. Launching
the 16 kernels of Step-3's `attend_moe`, or the 27 of its `ffn_moe`, should cost the host less than
recording as many and launching the graph; this was not timed on a card. Neither has a condition or
a loop.

`branches`: for programs with the sampler, whose arguments stay where they are except for a few
small ones. Conditions and loops become nodes of the graph, too. Outside a graph XLA's host thread
waits at every condition until the device has finished everything enqueued before, and cannot
enqueue the next step meanwhile. This needs a driver for CUDA 12.3 or later; XLA leaves the nodes
out under older ones. In Step-3's `leave` a step of greedy slots runs 20 nodes, one of which is the
condition that skips all draws. Without conditions every step would draw: 8 windows for 128 slots,
with two searches of 31 rounds of 4 kernels each, are some 2,000 more nodes, or 3.4 ms at the 1.7
µs that the estimate charges for each."""

_ON_CPU = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}
"""YNNPACK multiplies matrices, as XLA:CPU has it by default, and does nothing else: it would
reduce arrays of 4,096 elements and more in another order than XLA reduces smaller ones, and a
token's norms and softmaxes would depend on how many others are in its step. Vectors are as wide as
the CPU has them, which halves the instructions of a product (`pallas_kernels/input_major.py`)."""

_GRAPHS: Mapping[CudaGraphs, dict[str, Any]] = {
    "off": {"xla_gpu_enable_command_buffer": ""},
    "branches": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        "CONDITIONAL,WHILE"
    },
}
_RAGGED = {
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
    "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
"""For ragged all-to-alls between processes (jax 0.12), used by `ffn.exchange: alltoall` and by
experts that move (`expert_programs.py`). XLA's default is a kernel for the GPUs of one process;
between processes a call fails. With NCCL's sends and receives the host would wait for the device
twice in each call, to read how many rows there are. The device kernel is one launch that reads the
numbers itself and writes to other GPUs over NVLink and, from the device, over NICs: it needs NCCL
2.29, and between hosts NICs that NCCL's GIN knows. It waits for rows from every device on other
hosts, but sends none if a device has none (`openxla/xla`, `ragged_all_to_all_device_kernel_lib`),
so `model/ffn/collectives.py` then sends one. It was never run on a card, so `serve` tests it first
(`commands/self_tests.py`). The scheduler lets the program compute what does not need the rows
while they come."""


def compiler_options(
    platform: str, graphs: CudaGraphs = "default", ragged: bool = False
) -> dict[str, Any]:
    """The options that a program is compiled with.

    Args:
      ragged: whether the program has ragged all-to-alls between processes.
    """
    if platform == "cpu":
        return dict(_ON_CPU)
    if platform not in ("cuda", "gpu"):
        return {}
    wanted = _GRAPHS.get(graphs, {}) | (_RAGGED if ragged else {})
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in wanted.items() if name not in given}

"""Which programs run as CUDA graphs on GPUs, and why: the one place that says it.

XLA turns runs of kernels into command buffers, which are CUDA graphs. A graph keeps the addresses
of its kernels' arguments; at a call with others XLA records every node again, and traces kernels
that are custom calls, ours, once more (of these it keeps 16 graphs). Elsewhere it has none.
"""

import os
from typing import Literal

CudaGraphs = Literal["default", "off", "branches"]
"""Of a program.

`default`: XLA's own choice.

`off`: of programs that a step runs once a layer. One executable serves all layers, so weights and
pages have other addresses at every call, and so do messages: no graph would ever be used twice.
Launching the 16 kernels of Step-3's `attend_moe`, or the 27 of its `ffn_moe`, should cost the
host less than recording as many and launching the graph; no card was there to time it. Neither has
a condition or a loop.

`branches`: of programs with the sampler, whose arguments stay where they are but for a few small
ones. Conditions and loops, too, are nodes of the graph. Outside of one XLA's host thread waits for
the device at every condition, until all that was enqueued before it is done, and the next step is
not enqueued meanwhile. It needs a driver for CUDA 12.3 or later; XLA leaves these nodes out under
others. Of Step-3's `leave` a step of greedy slots runs 20 nodes, and one of them is the condition
that passes by all draws. Without conditions every step would draw: for 128 slots 8 windows with two
searches of 31 rounds of 4 kernels, some 2,000 nodes more, or 3.4 ms at the 1.7 µs that the estimate
charges for each.
"""

_FLAG = "xla_gpu_enable_command_buffer"
_KINDS = {"off": "", "branches": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE"}


def compiler_options(graphs: CudaGraphs, platform: str) -> dict[str, str] | None:
    """What a program is compiled with; None: nothing beside XLA's flags. Who names the flag in
    XLA_FLAGS has it for all programs."""
    if graphs == "default" or platform not in ("cuda", "gpu") or is_set(_FLAG):
        return None
    return {_FLAG: _KINDS[graphs]}


def is_set(flag: str) -> bool:
    """Whether XLA_FLAGS names it."""
    return flag in os.environ.get("XLA_FLAGS", "")

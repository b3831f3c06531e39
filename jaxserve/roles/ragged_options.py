"""What programs with ragged all-to-alls between processes are compiled with on GPUs, and why.

Of XLA's ways to run one (jax 0.12) the default is a kernel of one process's GPUs; between processes
there is none unless it is asked for: a call fails. Sends and receives by NCCL make the host wait
for the device twice in each, to read how many rows there are. `DEVICE_KERNEL` is one launch that
reads them itself, and writes to other GPUs over NVLink and, from the device, over NICs: NCCL 2.29
or later, and between hosts NICs that NCCL's GIN knows. It waits for rows of every device on other
hosts, and sends none where there are none (`openxla/xla`, `ragged_all_to_all_device_kernel_lib`):
`model/ffn/collectives.py` sends one then. No card was there to run it. So go the rows of
`ffn.exchange: alltoall` and the experts that move (`roles/expert_programs.py`).
"""

import functools
import logging
from typing import Any

from jaxserve.roles.cuda_graphs import is_set

DEVICE_KERNEL: dict[str, Any] = {
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
    "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
}
NEEDED = (
    "on GPUs of several processes all-to-alls, of rows and of experts that move, need NCCL 2.29, "
    "and GIN between hosts, for XLA's experimental kernel, which was never run here; with "
    "ffn.exchange: gather rows have none"
)
OVERLAP: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""What does not need the rows is computed while they come."""

logger = logging.getLogger(__name__)


def ragged_options(processes: int, platform: str) -> dict[str, Any]:
    """Of a program on devices of so many processes; who names a flag in XLA_FLAGS has it for all
    programs. What that needs is logged once."""
    if platform not in ("cuda", "gpu") or processes == 1:
        return {}
    _tell()
    return {name: value for name, value in (DEVICE_KERNEL | OVERLAP).items() if not is_set(name)}


@functools.cache
def _tell() -> None:
    logger.warning(NEEDED)

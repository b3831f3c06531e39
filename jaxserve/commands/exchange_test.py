"""Self-test of `ffn.exchange: alltoall` on GPUs, before a process starts JAX.

XLA's all-to-all between GPU processes is experimental: it was seen to crash, and to hang in the
device's queue, which then serves no other program. So each process of the runtime starts one for
the test (`jaxserve/preflight/exchange.py`). They pass it or fail it together, so all start with the
same exchange.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.commands.children import ending_with_parent
from jaxserve.config.deployment import Deployment
from jaxserve.fleet.hardware import choose_platform
from jaxserve.model.ffn.traffic import exchange_of

PLATFORMS = ("cuda",)
WORKER = ("-m", "jaxserve.preflight.worker", "exchange")
SECONDS = 300.0
"""For JAX's start on all processes, two compilations and the test; a hang lasts as long."""

logger = logging.getLogger("jaxserve.serve")


def with_tested_exchange(deployment: Deployment, arguments: Sequence[str]) -> Deployment:
    """Returns the deployment with `ffn.exchange: gather` where its all-to-all fails the test.

    Args:
      arguments: those of this command, which name deployment and process.
    """
    untested = choose_platform() not in PLATFORMS
    if untested or exchange_of(read_model(deployment)[0], deployment) == "gather":
        return deployment
    try:
        subprocess.run(
            [sys.executable, *WORKER, *arguments],
            timeout=SECONDS,
            check=True,
            preexec_fn=ending_with_parent(signal.SIGKILL),
        )
        return deployment
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("ffn.exchange: gather takes the place of alltoall, which failed: %s", error)
    ffn = msgspec.structs.replace(deployment.ffn, exchange="gather")
    return msgspec.structs.replace(deployment, ffn=ffn)

"""Tests of an exchange and a transport that a platform may not run, before a process starts JAX.

XLA's all-to-all between GPU processes is experimental: it was seen to crash, and to hang in the
device's queue, which then serves no other program. Across TPU hosts `device_put` may become a
handshake through the coordination service for every message. So each process of the runtime starts
one for the test (`jaxserve/preflight/`). They pass or fail it together, so all start with the same
values.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from jaxserve.commands.children import ending_with_parent
from jaxserve.config.deployment import Deployment
from jaxserve.fleet.hardware import choose_platform

WORKER = ("-m", "jaxserve.preflight.worker")
SECONDS = 300.0
"""For JAX's start on all processes, compilations and the test; a hang lasts as long."""

logger = logging.getLogger("jaxserve.serve")


def with_tested_links(deployment: Deployment, arguments: Sequence[str]) -> Deployment:
    """Returns the deployment with safe values in place of those that fail their test.

    Args:
      arguments: those of this command, which name deployment and process.
    """
    with_parent = ending_with_parent(signal.SIGKILL)
    for section, key, safe in _doubtful(deployment):
        command = [sys.executable, *WORKER, key, *arguments]
        try:
            subprocess.run(command, timeout=SECONDS, check=True, preexec_fn=with_parent)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("%s.%s: %s, as another value failed: %s", section, key, safe, error)
            changed = msgspec.structs.replace(getattr(deployment, section), **{key: safe})
            deployment = msgspec.structs.replace(deployment, **{section: changed})
    return deployment


def _doubtful(deployment: Deployment) -> Iterator[tuple[str, str, str]]:
    """Section and key of each value to test (the test's name), and the value to fall back to."""
    platform = choose_platform()
    if platform == "cuda" and deployment.ffn.exchange == "alltoall":
        yield "ffn", "exchange", "gather"
    if platform == "tpu" and (link := deployment.topology.transport) and link.falls_back_to:
        yield "link", "transport", link.falls_back_to

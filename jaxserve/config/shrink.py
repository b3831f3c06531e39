"""A role on fewer devices than its deployment file says, when some are lost.

The command that starts a worker again says how many devices are left (`serve --devices N`), or the
file allows any number (`ffn.shrink`). Over `pull` an ffn worker may shrink at any start: messages
look the same, and attention workers notice nothing but its pace. Called by `serve.py` and
`fleet/ffn_runtime.py`.
"""

import logging
from typing import TYPE_CHECKING, Literal

import msgspec

from jaxserve.config.checks import complete
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.config.deployment import Deployment

logger = logging.getLogger(__name__)


def shrunk(
    deployment: "Deployment", role: Literal["attention", "ffn"], devices: int
) -> "Deployment":
    """Returns the deployment with a role on at most this number of devices.

    The ffn role loses ep ranks: every other rank holds more experts, and reads them from the
    checkpoint. Attention loses DP groups. Where fewer devices are left than tp, tp shrinks to the
    largest of its divisors that they suffice for.

    Raises:
      ConfigError: no device is left, the role shares a runtime with the other one, or the sizes
        that are left do not fit each other (`checks.complete`).
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}: expected at least 1")
    if not deployment.topology.separates_domains:
        raise ConfigError(
            f"--devices {devices}: in a runtime of both roles the devices of each are what the "
            "deployment says; only a role with a runtime of its own, or colocated, can have fewer"
        )
    sizes = deployment.ffn if role == "ffn" else deployment.attention
    devices *= deployment.ffn.instances if role == "ffn" else 1  # each has a runtime of its own
    if devices >= sizes.devices:
        return deployment
    tp = max(size for size in range(1, sizes.tp + 1) if not sizes.tp % size and size <= devices)
    rows = devices // tp
    axis = "ep" if role == "ffn" else "dp"
    before = getattr(sizes, axis)
    rows = min(rows, before) if tp == sizes.tp else rows
    logger.warning(
        "%s: %d of %d devices: %s %d x tp %d instead of %d x %d",
        *(role, devices, sizes.devices, axis, rows, tp, before, sizes.tp),
    )
    changed = msgspec.structs.replace(sizes, tp=tp, **{axis: rows})
    return complete(msgspec.structs.replace(deployment, **{role: changed}))

"""Chooses the open keys of a deployment that one process has to itself.

Called by `llm.py`, `serve.py`, `generate.py` and `doctor`, through `load_deployment`. On a CPU no
JAX backend is started: how many devices are simulated is decided later, by the layout.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config.auto import AUTO_KEYS
from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from jaxserve.roles.sizing import SizeChoice, UsableDevices

    FindDevices = Callable[[Deployment], UsableDevices | None]

logger = logging.getLogger(__name__)


class Sizing:
    """Chooser that `load_deployment` takes as `choose`. It keeps each choice and its reason.

    Args:
      machine: the devices, or a function that finds the devices of a deployment for another host;
        None, also as the function's result: the devices of this host.
      stages: whether stages will be measured, so that steps are driven stage by stage.

    Attributes:
      machine: the devices, once values were chosen.
      found: the choices, by key.
    """

    def __init__(self, machine: "UsableDevices | FindDevices | None" = None, stages: bool = False):
        self._find: FindDevices = machine if callable(machine) else lambda deployment: machine
        self.machine = None if callable(machine) else machine
        self.found: dict[str, SizeChoice] = {}
        self._kept = frozenset({"pipeline"} if stages else ())

    def __call__(self, deployment: Deployment, written: frozenset[str]) -> Mapping[str, Any]:
        """See `Choose`. Chooses nothing where processes share the deployment, or where its model is
        unreadable; loading the model reports that."""
        from jaxserve.checkpoint.int8_products import read_model
        from jaxserve.roles.sizing import choose_sizes

        if written.issuperset(AUTO_KEYS) or is_shared(deployment):
            return {}
        try:
            config, _ = read_model(deployment)
        except CheckpointError:
            return {}
        self.machine = self.machine or self._find(deployment) or this_machine()
        self.found = choose_sizes(config, deployment, written | self._kept, self.machine)
        return {key: choice.value for key, choice in self.found.items()}

    def log(self) -> None:
        """Logs the choices, if there are any, on one line."""
        if found := self.found.items():
            line = ", ".join(f"{key} {str(one.value).replace(' ', '')}" for key, one in found)
            logger.info("chosen: %s (serve --check says why)", line)


def is_shared(deployment: Deployment) -> bool:
    """Whether several processes read the deployment, and so must find the same values in it."""
    roles = deployment.attention, deployment.ffn
    return bool(
        deployment.topology.crosses_runtimes
        or deployment.prefill.workers
        or deployment.domains > 1
        or deployment.fleet.domains
        or any(role.processes > 1 for role in roles)
    )


def this_machine() -> "UsableDevices":
    """The devices of this process. Starts a JAX backend unless they are the CPU's."""
    import jax

    from jaxserve.fleet.hardware import choose_platform
    from jaxserve.mesh import memory_limit
    from jaxserve.roles.capacity import free_host_memory
    from jaxserve.roles.sizing import DEVICE_PART, HOST_PART, UsableDevices

    if choose_platform() == "cpu":
        free = free_host_memory()
        return UsableDevices(
            "cpu", _cpu_devices(), None if free is None else round(HOST_PART * free)
        )
    devices = jax.local_devices()
    known = [size for device in devices if (size := memory_limit(device)) is not None]
    memory = round(DEVICE_PART * min(known)) if known else None
    return UsableDevices("tpu" if devices[0].platform == "tpu" else "gpu", len(devices), memory)


def _cpu_devices() -> int:
    """Most CPU devices that this process can have: one a core that it may use."""
    import jax

    cores, now = usable_cores(), jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", now + 1)
    except RuntimeError:  # a backend runs already, with the devices that it has
        return min(cores, jax.local_device_count())
    jax.config.update("jax_num_cpu_devices", now)
    return cores


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity, or fewer where a control group has
    a quota of CPU time. A part of a core counts only where it is all that the process has."""
    from jaxserve.roles.capacity import control_groups

    affinity = getattr(os, "sched_getaffinity", None)
    cores: float = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in control_groups(root, "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
                # "max" in version 2 and -1 in version 1 are no quota.
                if (part := float(quota) / float(period)) > 0:
                    cores = min(cores, part)
            except (OSError, ValueError):
                continue
    return max(1, int(cores))

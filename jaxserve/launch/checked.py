"""Sizes a deployment for the hardware of a rendering, and refuses one that cannot run there.

Called by `__main__.py`. A deployment is refused with the reasons of `serve --check`.
"""

import contextlib
import io
import math
from typing import Any

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.commands.checking import check, on_named_hardware
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.launch.slice_layout import slice_layouts
from jaxserve.launch.workloads import Workload, host_processes
from jaxserve.planner.hardware import load_hardware
from jaxserve.roles.capacity import GB
from jaxserve.roles.pipelines import role_bytes
from jaxserve.storage.bucket import is_url

ROLES: tuple[Role, ...] = ("attention", "ffn")
RESERVE = 0.95
"""Part of a device's memory that a deployment may fill where its file says nothing."""


def model_of(deployment: Deployment) -> ModelConfig | None:
    """Returns the deployment's model, or None where its folder is elsewhere."""
    if is_url(deployment.model):
        return None
    try:
        config, _ = read_model(deployment)
    except CheckpointError:
        return None
    return on_named_hardware(config, deployment)


def sized(deployment: Deployment, hardware: str) -> Deployment:
    """Returns the deployment on other hardware where its roles name any.

    `memory_gb` becomes the same part of the new device's memory, and `cache.pages` what then fits,
    at most what all sequences can fill. The same holds for prefill workers.
    """
    tree = msgspec.to_builtins(deployment)
    for part in (tree, tree["prefill"]):
        for role in ROLES:
            _move(part[role], hardware)
    made = msgspec.convert(tree, Deployment)
    if made.attention.memory_gb == deployment.attention.memory_gb:
        return made
    if made.prefill.workers and "pages" in made.prefill.cache:
        tree["prefill"]["cache"]["pages"] = _fitting_pages(deployment_of(made, "prefill"))
    tree["cache"]["pages"] = _fitting_pages(made)
    return msgspec.convert(tree, Deployment)


def _move(keys: dict[str, Any], hardware: str) -> None:
    """Puts a role's keys on this hardware, if they name any."""
    named = keys.get("hardware")
    if not named or named == hardware:
        return
    keys["hardware"] = hardware
    if keys.get("memory_gb"):
        part = keys["memory_gb"] / load_hardware(named).memory_gb
        keys["memory_gb"] = round(part * load_hardware(hardware).memory_gb, 1)


def _fitting_pages(deployment: Deployment) -> int:
    """Returns how many pages fit and all sequences can fill; unchanged where none would do."""
    config, cache, limits = model_of(deployment), deployment.cache, deployment.scheduler
    if config is None:
        return cache.pages
    try:
        attention = role_bytes(config, deployment)[0]
    except ConfigError:
        return cache.pages  # the check says why
    room = round(deployment.attention.memory_gb * GB) - attention.total + attention.cache
    longest = -(-limits.max_length // cache.page_size)
    fitting = room * cache.pages // attention.cache
    most = limits.slots * deployment.lanes * longest
    return cache.pages if fitting < longest else min(fitting, most)


def on_slice(deployment: Deployment, hardware: str) -> tuple[Deployment, list[str]]:
    """Returns the deployment with the layout on its TPU slice that has the fewest bytes times hops,
    and a line for each layout, the chosen one first.

    Raises:
      ConfigError: no slice has that many chips.
    """
    config = model_of(deployment)
    found = slice_layouts(deployment, config, hardware) if config else []
    return found[0].deployment if found else deployment, [str(each) for each in found]


def refuse_unfit(deployment: Deployment, hardware: str) -> str:
    """Refuses a deployment that `serve --check` refuses on its hardware.

    Args:
      hardware: name for roles that name none; empty: unknown.

    Returns:
      A warning where nothing could be checked; else nothing.

    Raises:
      ConfigError: it does not fit, or does not run there.
    """
    if model_of(deployment) is None:
        return (
            f"not checked: {deployment.model} cannot be read here; run `serve --check` where it can"
        )
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        refused = check(assumed_on(deployment, hardware))
    if refused:
        raise ConfigError(said.getvalue().strip().removeprefix("jaxserve: "))
    return ""


def assumed_on(deployment: Deployment, hardware: str) -> Deployment:
    """Returns the deployment with hardware and memory in its roles, as a check needs them."""
    made = {}
    for role in ROLES:
        section = getattr(deployment, role)
        name = section.hardware or hardware
        memory = section.memory_gb
        if name and name != "cpu":
            most = load_hardware(name).memory_gb
            memory = min(memory, most) if memory else round(RESERVE * most, 1)
        made[role] = msgspec.structs.replace(section, hardware=name, memory_gb=memory)
    return msgspec.structs.replace(deployment, **made)


BASE_GIB, PROCESS_GIB, ROUTER_GIB = 8, 6, 8
"""Memory of a pod beside its arrays, of each process (compiling) and of a router. Guesses."""
LOADING = 0.1
"""Part of a pod's weights that its host holds while it loads them. A guess."""


def with_host_memory(work: Workload, deployment: Deployment) -> Workload:
    """Returns a workload with its pods' host memory, by the arithmetic of `serve --check`.

    Simulated devices hold their arrays in the host's memory.
    """
    if not work.devices:
        return work._replace(host_gib=ROUTER_GIB)
    own = deployment_of(deployment, work.role)
    processes = (len(host_processes(deployment, work)) and work.devices) or 1
    size = BASE_GIB + PROCESS_GIB * processes
    if (config := model_of(own)) is not None:
        with contextlib.suppress(ConfigError):  # the check says why
            parts = role_bytes(config, own)
            held = max(part.total if work.hardware is None else part.weights for part in parts)
            part = 1 if work.hardware is None else LOADING
            size += math.ceil(part * held * work.devices / 2**30)
    return work._replace(host_gib=size)

"""Sizes a deployment for the hardware of a rendering, and refuses one that cannot run there.

Called by `__main__.py`. A deployment is refused with the reasons of `serve --check`.
"""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.commands.checking import check
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.config.model import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.fleet.sizing import on_named_hardware
from jaxserve.mesh import Role
from jaxserve.planner.hardware import load_hardware
from jaxserve.roles.capacity import GB, RoleBytes, role_bytes
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
    changed = {role: _on(getattr(deployment, role), hardware) for role in ROLES}
    prefill: dict[str, Any] = {
        role: _on_keys(getattr(deployment.prefill, role), hardware) for role in ROLES
    }
    made = msgspec.structs.replace(
        deployment, **changed, prefill=msgspec.structs.replace(deployment.prefill, **prefill)
    )
    if made.attention.memory_gb == deployment.attention.memory_gb:
        return made
    if made.prefill.workers and "pages" in made.prefill.cache:
        keys = made.prefill.cache | {"pages": _fitting_pages(deployment_of(made, "prefill"))}
        prefill["cache"] = keys
    return msgspec.structs.replace(
        made,
        cache=msgspec.structs.replace(made.cache, pages=_fitting_pages(made)),
        prefill=msgspec.structs.replace(made.prefill, **prefill),
    )


def _on(section: Any, hardware: str) -> Any:
    """Returns a role's section on this hardware, if it names any."""
    return msgspec.convert(
        _on_keys(msgspec.to_builtins(section), hardware), type(section), strict=False
    )


def _on_keys(keys: Mapping[str, Any], hardware: str) -> dict[str, Any]:
    """Returns keys of a role with this hardware, if they name any."""
    named, made = keys.get("hardware"), dict(keys)
    if not named or named == hardware:
        return made
    made["hardware"] = hardware
    if keys.get("memory_gb"):
        part = keys["memory_gb"] / load_hardware(named).memory_gb
        made["memory_gb"] = round(part * load_hardware(hardware).memory_gb, 1)
    return made


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


def held_bytes(deployment: Deployment, role: str) -> list[RoleBytes]:
    """Returns what the devices of a workload hold, by the arithmetic of `serve --check`.

    Args:
      role: the workload's role, as `deployment_of` takes it.
    """
    own = deployment_of(deployment, "prefill") if role == "prefill" else deployment
    config = model_of(own)
    return [] if config is None else list(role_bytes(config, own))

"""Which process of a deployment this is: flags, environment, or the cluster's own variables.

Called by the entry points before `bootstrap.joined`. Starts no JAX backend and opens no connection.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from jaxserve.config.sections import MIN_SECRET_CHARACTERS
from jaxserve.errors import ConfigError
from jaxserve.fleet.membership import ProcessArguments as ProcessArguments
from jaxserve.link.session.channel import join_address, split_address

TOKEN_VARIABLE = "JAXSERVE_CLUSTER_TOKEN"
STAND_IN = "--stand-in"
_HELPS = {
    "process_id": "number of this process; 0 leads and serves",
    "processes": "number of processes (1)",
    "coordinator": "host:port on which process 0 starts JAX's coordination service",
    "control": "host:port on which process 0 serves the control plane",
    "control_bind": "host:port to listen on where it is not the one of --control",
    "slice": "number of this host's slice, where --process-id counts within a slice (0)",
    "slices": "slices over which the processes are divided equally (1)",
    "worker": "number of this prefill worker or domain among those of the fleet (0)",
    "devices": "devices that are left for this worker's role, where they are fewer than the "
    "deployment says",
    "host_processes": "processes that this host is to run, with a part of its devices each; "
    "--process-id and --processes are of the hosts then (1)",
    "host_process": "number of this process among those of its host; set by --host-processes",
}
"""Help texts by name. `process_id` is given as --process-id or JAXSERVE_PROCESS_ID, and so on."""
_TEXTS = ("coordinator", "control", "control_bind")
_NUMBERS = tuple(name for name in _HELPS if name not in _TEXTS)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"JAXSERVE_{name.upper()}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say who a process is; each has an environment variable too."""
    group = parser.add_argument_group(
        "processes",
        "The same command runs on every host. Each flag may come from the environment instead; "
        f"the secret that processes show each other comes from {TOKEN_VARIABLE} only.",
    )
    for name, text in _HELPS.items():
        kind = int if name in _NUMBERS else str
        group.add_argument(_flag(name), type=kind, help=f"{text} [{_variable(name)}]")
    group.add_argument(
        "--role",
        choices=("attention", "ffn", "colocated", "prefill", "decode", "router"),
        default="",
        help="the role to play here; needed where roles have runtimes of their own, and in a fleet",
    )
    group.add_argument(
        STAND_IN,
        action="store_true",
        help="play the other role of a prefill worker and a domain (fleet.least_domains, "
        "fleet.rebalance_roles); routers have it started again with this option, and without it",
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="take the above from the cluster (Slurm, Open MPI, GKE, Cloud TPU), as JAX does",
    )


def from_arguments(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ProcessArguments:
    """Who this process is: flags first, then the environment, then the cluster if asked.

    Raises:
      ConfigError: something is missing or no number, address or process of the deployment.
    """
    values: dict[str, str] = {}
    for name in _HELPS:
        given = getattr(arguments, name, None)
        values[name] = str(given) if given is not None else environment.get(_variable(name), "")
        if name in _NUMBERS and values[name] and not values[name].isdecimal():
            raise ConfigError(
                f"{_flag(name)} [{_variable(name)}] = {values[name]!r}: expected a whole number"
            )
    local_device_ids = None
    if getattr(arguments, "distributed", False):
        if not _take_from_pod(values, environment):
            local_device_ids = _detect(values)
        _add_control(values)
    if values["slices"]:
        values["process_id"] = f"{_over_slices(values)}"
    numbers: dict[str, Any] = {name: int(values[name]) for name in _NUMBERS if values[name]}
    processes, process_id = numbers.get("processes", 1), numbers.get("process_id", 0)
    token = environment.get(TOKEN_VARIABLE, "")
    if 0 < len(token) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE}: {len(token)} characters, at least {MIN_SECRET_CHARACTERS} needed"
        )
    if processes < 1 or process_id >= processes:
        raise ConfigError(
            f"--process-id {process_id} of --processes {processes}: expected 0 to {processes - 1}"
        )
    if numbers.get("host_processes") == 0:
        raise ConfigError("--host-processes 0: expected at least 1")
    if processes > 1:
        for name in ("process_id", "coordinator", "control"):
            if not values[name]:
                raise ConfigError(
                    f"{processes} processes need {_flag(name)} (or {_variable(name)})"
                )
        if not token:
            raise ConfigError(
                f"{processes} processes need {TOKEN_VARIABLE}: one secret, the same for each"
            )
        for name in _TEXTS:
            if values[name]:
                split_address(values[name], _flag(name))
    return ProcessArguments(
        role=getattr(arguments, "role", ""),
        stand_in=getattr(arguments, "stand_in", False),
        coordinator=values["coordinator"],
        control_address=values["control"],
        control_bind=values["control_bind"],
        local_device_ids=local_device_ids,
        token=token,
        **{name: number for name, number in numbers.items() if name not in ("slice", "slices")},
    )


def _over_slices(values: Mapping[str, str]) -> int:
    """Returns the number of this process among those of all slices, from its number within its own.
    Raises ConfigError if the slices do not divide the processes, or lack this slice or process."""
    slices, number = int(values["slices"]), int(values["slice"] or 0)
    processes, within = int(values["processes"] or 1), int(values["process_id"] or 0)
    if slices < 1 or processes % slices:
        raise ConfigError(f"--slices {slices} do not divide --processes {processes}")
    if number >= slices or within >= processes // slices:
        raise ConfigError(
            f"--slice {number} of --slices {slices}, --process-id {within}: expected slices 0 to "
            f"{slices - 1} with processes 0 to {processes // slices - 1} each"
        )
    return number * (processes // slices) + within


_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_POD_PORT = 9001
"""Port of JAX's coordination service in pods."""


def _take_from_pod(values: dict[str, str], environment: Mapping[str, str]) -> bool:
    """Fills missing values in from the variables that GKE gives the pods of a TPU slice; returns
    whether the variables exist. JAX reads them only where it has found a TPU. Raises ConfigError if
    they contradict each other."""
    names = next((environment[name] for name in _TPU_HOSTS if environment.get(name)), "")
    number = environment.get("TPU_WORKER_ID", "")
    if not names or not number:
        return False
    hosts = [name.strip().rpartition(":")[0] or name.strip() for name in names.split(",")]
    slices = environment.get("MEGASCALE_NUM_SLICES", "") or "1"
    own = environment.get("MEGASCALE_SLICE_ID", "") or "0"
    if not (number.isdecimal() and slices.isdecimal() and own.isdecimal()):
        raise ConfigError(
            f"--distributed: TPU_WORKER_ID = {number!r}, MEGASCALE_SLICE_ID = {own!r} of "
            f"MEGASCALE_NUM_SLICES = {slices!r}: expected whole numbers"
        )
    if int(number) >= len(hosts) or int(own) >= int(slices):
        raise ConfigError(
            f"--distributed: TPU_WORKER_ID {number} of {len(hosts)} hosts, slice {own} of "
            f"{slices}: expected numbers below"
        )
    leader = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    found = {
        "coordinator": f"{leader}:{_POD_PORT}",
        "processes": f"{len(hosts) * int(slices)}",
        "process_id": f"{int(own) * len(hosts) + int(number)}",
    }
    for name, value in found.items():
        values[name] = values[name] or value
    return True


def _add_control(values: dict[str, str]) -> None:
    """The control plane is where the coordination service is, a port further."""
    if not values["control"]:
        host, port = split_address(values["coordinator"], "--coordinator")
        values["control"] = join_address(host, port + 1 if port < 65535 else port - 1)


def _detect(values: dict[str, str]) -> tuple[int, ...] | None:
    """Fills in missing settings from the cluster's own variables; returns the local device ids."""
    # The same detection that jax.distributed.initialize() runs. It is private, but only it knows
    # the process id before a backend or the coordination service starts.
    from jax._src import clusters

    coordinator, processes, process_id, devices = (
        clusters.ClusterEnv.auto_detect_unset_distributed_params(
            values["coordinator"] or None,
            int(values["processes"]) if values["processes"] else None,
            int(values["process_id"]) if values["process_id"] else None,
            None,
            None,
            60,
        )
    )
    if coordinator is None or processes is None or process_id is None:
        raise ConfigError(
            "--distributed: no cluster found (Slurm, Open MPI, GKE, Cloud TPU); say "
            "--process-id, --processes, --coordinator and --control instead"
        )
    values |= {"coordinator": coordinator, "processes": f"{processes}"}
    values["process_id"] = f"{process_id}"
    return None if devices is None else tuple(devices)

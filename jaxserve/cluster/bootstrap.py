"""Joins this process to a deployment: who it is, which devices it has, `jax.distributed`.

Called first by every entry point, before anything that might start a JAX backend; importing it
starts none. The order for several processes:

1. `from_arguments` says who we are (flags, environment, or the cluster's own variables).
2. `join` meets the others over the control plane, then sets the devices and calls
   `jax.distributed.initialize`. Not earlier: JAX aborts a process whose peers do not come, without
   an error that could be caught. What it returns is the `Leader` or `Follower` of this process.
3. At the end `leave`, after a failure `abandon`, in every process; neither returns.

What JAX does when a peer dies (0.11.2 and 0.12, measured): by default its coordination service
makes every process abort, the leader included, heartbeat_timeout_seconds after a follower's death.
With `jax_enable_recoverability` the leader lives on. A follower is aborted at once when the
leader's service is gone, which no option prevents; `_delay_abort` gives it time to say why.
"""

import argparse
import ctypes
import importlib.util
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import msgspec

from jaxserve.cluster.follower import Follower
from jaxserve.cluster.leader import Leader
from jaxserve.cluster.membership import ProcessShare, identity, process_shares
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError, EngineFailedError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "JAXSERVE_CLUSTER_TOKEN"
_FLAGS = {
    "process_id": ("--process-id", "JAXSERVE_PROCESS_ID"),
    "processes": ("--processes", "JAXSERVE_PROCESSES"),
    "coordinator": ("--coordinator", "JAXSERVE_COORDINATOR"),
    "control": ("--control", "JAXSERVE_CONTROL"),
    "control_bind": ("--control-bind", "JAXSERVE_CONTROL_BIND"),
}
_JAX_HEARTBEAT_SECONDS = 100
"""JAX's own default. Ours are shorter, so that ours is the error that is seen."""
_LAST_WORDS_SECONDS = 1.0
"""For followers to read why the leader gives up, before its connection closes."""


class ProcessArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is among the processes of a deployment."""

    process_id: int = 0
    processes: int = 1
    coordinator: str = ""
    """`host:port` of JAX's coordination service, which process 0 starts."""
    control_address: str = ""
    """`host:port` of the leader's control plane."""
    control_bind: str = ""
    """Where the leader listens; differs from `control_address` behind a service name."""
    local_device_ids: tuple[int, ...] | None = None
    """Accelerators of the host that belong to this process; None: all."""
    token: str = ""

    @property
    def is_leader(self) -> bool:
        return self.process_id == 0

    def __repr__(self) -> str:
        shown = {name: value for name, value in msgspec.structs.asdict(self).items() if value}
        shown["token"] = "…" if self.token else ""
        return f"ProcessArguments({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say who a process is; each has an environment variable too."""
    group = parser.add_argument_group(
        "processes",
        "The same command runs on every host. Each flag may come from the environment instead; "
        f"the secret that processes show each other comes from {TOKEN_VARIABLE} only.",
    )
    helps = {
        "process_id": "number of this process; 0 leads and serves",
        "processes": "number of processes (1)",
        "coordinator": "host:port on which process 0 starts JAX's coordination service",
        "control": "host:port on which process 0 serves the control plane",
        "control_bind": "host:port to listen on where it is not the one of --control",
    }
    for name, (flag, variable) in _FLAGS.items():
        kind = int if name.startswith("process") else str
        group.add_argument(flag, type=kind, dest=name, help=f"{helps[name]} [{variable}]")
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
    for name, (flag, variable) in _FLAGS.items():
        given = getattr(arguments, name, None)
        values[name] = str(given) if given is not None else environment.get(variable, "")
        if name.startswith("process") and values[name] and not values[name].isdecimal():
            raise ConfigError(f"{flag} [{variable}] = {values[name]!r}: expected a whole number")
    local_device_ids = None
    if getattr(arguments, "distributed", False):
        local_device_ids = _detect(values)
    processes, process_id = int(values["processes"] or 1), int(values["process_id"] or 0)
    token = environment.get(TOKEN_VARIABLE, "")
    if processes < 1 or process_id >= processes:
        raise ConfigError(
            f"--process-id {process_id} of --processes {processes}: expected 0 to {processes - 1}"
        )
    if processes > 1:
        for name in ("process_id", "coordinator", "control"):
            if not values[name]:
                flag, variable = _FLAGS[name]
                raise ConfigError(f"{processes} processes need {flag} (or {variable})")
        if not token:
            raise ConfigError(
                f"{processes} processes need {TOKEN_VARIABLE}: one secret, the same for each"
            )
        for name in ("coordinator", "control", "control_bind"):
            if values[name]:
                _split_address(values[name], _FLAGS[name][0])
    return ProcessArguments(
        process_id=process_id,
        processes=processes,
        coordinator=values["coordinator"],
        control_address=values["control"],
        control_bind=values["control_bind"] or values["control"],
        local_device_ids=local_device_ids,
        token=token,
    )


def _detect(values: dict[str, str]) -> tuple[int, ...] | None:
    """Fills in what is missing from the cluster's own variables; returns the local device ids."""
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
    if not values["control"]:
        host, port = _split_address(coordinator, "--coordinator")
        values["control"] = f"{host}:{port + 1 if port < 65535 else port - 1}"
    return None if devices is None else tuple(devices)


def _split_address(address: str, flag: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} {address!r}: expected host:port")
    return host, int(port)


def join(
    arguments: ProcessArguments,
    deployment: Deployment,
    on_failure: Callable[[EngineFailedError], None],
) -> Leader | Follower | None:
    """Meets the other processes and initialises JAX with them; None for a single process.

    Args:
      on_failure: called once when another process is gone or stuck (`Leader`, `Follower`).

    Raises:
      ConfigError: the layout does not divide over the processes, this process is refused, or the
        leader cannot listen.
      EngineFailedError: others did not come within `cluster.start_seconds`; names them.
    """
    if arguments.processes == 1:
        initialise(arguments, deployment)
        return None
    here = identity(arguments.process_id, arguments.processes, deployment)
    shared: dict[str, Any] = {
        "token": arguments.token,
        "cluster": deployment.cluster,
        "on_failure": on_failure,
    }
    if not arguments.is_leader:
        follower = Follower(here, address=arguments.control_address, **shared)
        follower.register()
        initialise(arguments, deployment)
        return follower
    leader = Leader(here, address=arguments.control_bind, **shared)
    leader.start()
    try:
        leader.wait_registered()
    except EngineFailedError as error:
        leader.close(failure=str(error))
        raise
    initialise(arguments, deployment)
    return leader


def initialise(arguments: ProcessArguments, deployment: Deployment) -> ProcessShare:
    """Gives this process its devices and, with several, joins them with `jax.distributed`.

    With several processes call it once all have registered with the leader: then every peer is
    there, and a failure of `jax.distributed.initialize` is one of the network.

    Raises:
      ConfigError: the layout does not divide over the processes, or JAX has already started with
        too few CPU devices.
    """
    share = process_shares(deployment, arguments.processes)[arguments.process_id]
    on_cpu = expected_platform() == "cpu"
    if on_cpu:
        _set_cpu_devices(share, alone=arguments.processes == 1)
    if arguments.processes == 1:
        return share
    start_seconds = math.ceil(deployment.cluster.start_seconds)
    # A dead peer must not take this process along: we say who died, answer clients, then exit.
    jax.config.update("jax_enable_recoverability", True)
    # JAX's preemption service would catch the SIGTERM that starts our own drain.
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu and share.devices > 1:
        _widen_cpu_pool(share.devices)
    host, port = _split_address(arguments.coordinator, "--coordinator")
    if on_cpu:
        here = _local_address(host, port)
        jax.config.update("jax_cross_host_transfer_socket_address", f"{here}:{free_port(here)}")
        jax.config.update("jax_cross_host_transport_addresses", f"{here}:0")
        jax.config.update("jax_cross_host_transfer_timeout_seconds", start_seconds)
    jax.distributed.initialize(
        coordinator_address=arguments.coordinator,
        num_processes=arguments.processes,
        process_id=arguments.process_id,
        local_device_ids=arguments.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=start_seconds,
        heartbeat_timeout_seconds=max(
            _JAX_HEARTBEAT_SECONDS, 6 * math.ceil(deployment.cluster.heartbeat_seconds)
        ),
        # The service has no authentication: never offer it beyond this host without need.
        coordinator_bind_address=arguments.coordinator if is_loopback(host) else None,
    )
    if not arguments.is_leader:
        _delay_abort()
    return share


def expected_platform() -> str:
    """The platform JAX will choose, without starting it: JAX_PLATFORMS, or what is installed."""
    if platforms := jax.config.jax_platforms:
        return platforms.split(",")[0]
    accelerators = {"libtpu": "tpu", "jax_cuda12_plugin": "cuda", "jax_cuda13_plugin": "cuda"}
    for module, platform in accelerators.items():
        if importlib.util.find_spec(module) is not None:
            return platform
    return "cpu"


def _set_cpu_devices(share: ProcessShare, alone: bool) -> None:
    """Makes the simulated CPU devices of this process: at least so many, or exactly with peers."""
    wanted = max(share.devices, jax.config.jax_num_cpu_devices) if alone else share.devices
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:  # a backend runs already, so its devices can be counted
        if (there := jax.local_device_count()) < share.devices or not alone:
            raise ConfigError(
                f"this process needs {share.devices} CPU devices ({share.attention} attention + "
                f"{share.ffn} ffn), and JAX has already started with {there}: create the "
                f"deployment before any other use of JAX, or set JAX_NUM_CPU_DEVICES={wanted}"
            ) from None


def _widen_cpu_pool(devices: int) -> None:
    """Gives XLA's CPU client threads enough for transfers and collectives at the same time.

    A collective among simulated devices holds a thread of the pool for each of them, and the pool
    has max(cores, devices) of them. Transfers from other processes wait in the same pool: with two
    cores, four devices and four lanes a collective was seen to wait for a thread for ever.
    XLA takes the number of cores from NPROC where that is set.
    """
    os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 4 * devices))


def _delay_abort() -> None:
    """Lets this process live some seconds longer when JAX aborts it because the leader is gone.

    JAX's client calls abort() on a thread of its own, a moment after the leader's connection
    closes, and before our own error could be seen. With libc's `sleep` as the handler of SIGABRT
    that thread sleeps (its argument, the signal's number, is 6: six seconds) and aborts then,
    while ours says what happened and exits. `sleep` is async-signal-safe.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    except (OSError, AttributeError, TypeError):
        logger.info("no libc: if the leader dies, JAX will abort this process")


def leave(peers: Leader | Follower | None, code: int = 0) -> NoReturn:
    """Takes this process out of the deployment in order, and ends it.

    The leader says goodbye here and goes last; followers call this when their `boundaries()` have
    ended. (JAX would abort a follower that is still connected when the leader goes.) The process
    ends without the interpreter's own finalisation: that kills daemon threads where they are, and
    one inside a device call, as for a step that was cut off, takes the process down with SIGABRT.
    """
    if isinstance(peers, Leader):
        peers.close()
    jax.distributed.shutdown()
    if isinstance(peers, Follower):
        peers.close()
    _exit(code)


def abandon(message: str, code: int = 1, *, peers: Leader | Follower | None = None) -> NoReturn:
    """Says why and ends the process at once, whatever its other threads are stuck in.

    For the end after a failure: device calls that wait for a dead peer never return, and an
    orderly exit would wait for them. A leader in `peers` tells its followers the reason.
    """
    logger.critical("%s", message)
    if isinstance(peers, Leader):
        peers.close(failure=message, timeout=_LAST_WORDS_SECONDS)
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this host alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def _local_address(host: str, port: int) -> str:
    """This host's address on the network that leads to `host`; sends nothing."""
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address = str(probe.getsockname()[0])
    return f"[{address}]" if ":" in address else address

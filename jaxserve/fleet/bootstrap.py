"""Joins this process to a deployment (control plane, devices, `jax.distributed`) and ends it.

Called first by every entry point, before anything that might start a JAX backend; importing it
starts none. With several processes, everything happens inside `joined`:

1. The processes meet over the control plane (`leader.py`, `follower.py`).
2. `initialise` sets the devices and calls `jax.distributed.initialize`. Not earlier: JAX aborts a
   process whose peers do not come, without an error that could be caught.
3. The block runs. When it ends, `leave` ends the process; after an exception, `abandon` does, and
   tells the others why. Neither returns: once arrays have crossed between processes, an ordinary
   exit of the interpreter waits for JAX's transfer server, for ever if a peer still waits for us.

What JAX does when a peer dies (0.11.2 and 0.12, measured): by default its coordination service
makes every process abort, the leader included, heartbeat_timeout_seconds after a follower's death.
With `jax_enable_recoverability` the leader lives on. A follower is aborted at once when the
leader's service is gone, which no option prevents; `_delay_abort` gives it time to say why.
"""

import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError, ConfigError, EngineFailedError, JaxserveError
from jaxserve.fleet.addresses import (
    free_port,
    is_loopback,
    listening_address,
    local_address,
    split_address,
)
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.hardware import choose_platform
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.membership import ProcessShare, identity, process_shares, role_share

logger = logging.getLogger(__name__)

Peers = Leader | Follower
"""This process's end of the control plane."""

_JAX_HEARTBEAT_SECONDS = 100
"""JAX's own default. Ours are shorter, so that ours is the error that is seen."""
_LAST_WORDS_SECONDS = 1.0
"""For followers to read why the leader gives up, before its connection closes."""


def _abandon(failure: EngineFailedError, peers: Peers) -> None:
    abandon(failure, peers=peers)


@contextlib.contextmanager
def joined(
    arguments: ProcessArguments,
    deployment: Deployment,
    *,
    on_failure: Callable[[EngineFailedError, Peers], None] = _abandon,
    on_drain: Callable[[str, Leader], None] = lambda reason, leader: None,
) -> Iterator[Peers | None]:
    """This process as part of its deployment, JAX initialised: its `Leader` or `Follower`.

    With several processes, the end of the block is the end of the process, by `leave` or, after an
    exception of any kind, by `abandon`. So it is where roles have runtimes of their own
    (`link.transport: pull`); the block gets None then. Otherwise one process gets None, too, and
    goes on behind the block as usual.

    Args:
      on_failure: called once, from a thread of the control plane, when another process is gone or
        stuck; the main thread may be inside a device call. Without it, the process is abandoned.
      on_drain: called once on the leader, likewise, when a follower was asked to end; says which.

    Raises:
      ConfigError: the layout does not divide over the processes.
    """
    if arguments.processes == 1 and deployment.link.transport != "pull":
        initialise(arguments, deployment)
        yield None
        return
    peers: Peers | None = None
    if arguments.processes > 1:
        peers = _end_of_the_control_plane(arguments, deployment, on_failure, on_drain)
    try:
        if isinstance(peers, Leader):
            peers.start()
            peers.wait_registered()
        elif peers is not None:
            peers.register()
        initialise(arguments, deployment)
        yield peers
    except BaseException as error:
        abandon(_cause(error, peers), peers=peers)
    leave(peers)


def _cause(error: BaseException, peers: Peers | None) -> BaseException:
    """What is behind an error: where it is not one of ours, a transfer may have broken because
    another process is gone."""
    if isinstance(peers, Follower):
        peers.fail(describe(error))
    if peers is None or not isinstance(error, Exception) or isinstance(error, JaxserveError):
        return error
    text = describe(error)
    cause = peers.find_cause(text) if isinstance(peers, Leader) else peers.failure
    if cause is not None:
        logger.error("%s", text, exc_info=error)
    return cause or error


def _end_of_the_control_plane(
    arguments: ProcessArguments,
    deployment: Deployment,
    on_failure: Callable[[EngineFailedError, Peers], None],
    on_drain: Callable[[str, Leader], None],
) -> Peers:
    here = identity(arguments.process_id, arguments.processes, deployment)
    if arguments.is_leader:
        control = arguments.control_address
        leader = Leader(
            here,
            address=arguments.control_bind or listening_address(control, "--control"),
            token=arguments.token,
            cluster=deployment.cluster,
            on_failure=lambda failure: on_failure(failure, leader),
            on_drain=lambda reason: on_drain(reason, leader),
        )
        return leader
    follower = Follower(
        here,
        address=arguments.control_address,
        token=arguments.token,
        cluster=deployment.cluster,
        on_failure=lambda failure: on_failure(failure, follower),
    )
    return follower


def initialise(arguments: ProcessArguments, deployment: Deployment) -> ProcessShare:
    """Gives this process its devices and, with several, joins them with `jax.distributed`.

    With several processes call it once all have registered with the leader: then every peer is
    there, and a failure of `jax.distributed.initialize` is one of the network.

    Raises:
      ConfigError: the layout does not divide over the processes, this process has another number
        of devices than its share of the layout, or JAX has already started with too few CPU
        devices.
    """
    share = own_share(arguments, deployment)
    on_cpu = choose_platform() == "cpu"
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
    host, port = split_address(arguments.coordinator, "--coordinator")
    if on_cpu:
        here = local_address(host, port, "--coordinator")
        jax.config.update("jax_cross_host_transfer_socket_address", f"{here}:{free_port(here)}")
        jax.config.update("jax_cross_host_transport_addresses", f"{here}:0")
        jax.config.update("jax_cross_host_transfer_timeout_seconds", start_seconds)
    jax.distributed.initialize(
        coordinator_address=arguments.coordinator,
        num_processes=arguments.processes,
        process_id=arguments.process_id,
        local_device_ids=_own_devices(arguments, deployment),
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
    check_devices(share, arguments.process_id, jax.local_device_count())
    return share


def _own_devices(arguments: ProcessArguments, deployment: Deployment) -> tuple[int, ...] | None:
    """The host's accelerators that belong to this process, by their numbers; None: all.

    Raises:
      ConfigError: processes of one host share its TPU chips.
    """
    number, platform = arguments.host_process, choose_platform()
    if number is None or platform == "cpu":
        return arguments.local_device_ids
    if platform == "tpu":
        raise ConfigError("--host-processes: on TPUs a host has one process")
    shares = process_shares(deployment, arguments.processes)
    before = shares[arguments.process_id - number : arguments.process_id]
    first = sum(share.devices for share in before)
    return tuple(range(first, first + shares[arguments.process_id].devices))


def own_share(arguments: ProcessArguments, deployment: Deployment) -> ProcessShare:
    """The devices that this process owns of the deployment's.

    Raises:
      ConfigError: the layout does not divide over the processes, or `--role` is missing, not this
        process's, or not of this deployment.
    """
    role = arguments.role
    if deployment.link.transport == "pull":
        if role not in ("attention", "ffn"):
            raise ConfigError(
                "link.transport = pull: attention and ffn have a runtime each, so say which one "
                f"this is: --role attention or --role ffn (now {role or 'none'})"
            )
        if arguments.processes > 1:
            raise ConfigError(
                f"--processes {arguments.processes}: over link.transport = pull a worker has one"
            )
        return role_share(deployment, role)
    share = process_shares(deployment, arguments.processes)[arguments.process_id]
    played = "colocated" if deployment.mode == "colocated" else share.role
    if role and role != played:
        raise ConfigError(
            f"--role {role}: process {arguments.process_id} of {arguments.processes} plays {played}"
        )
    return share


def check_devices(share: ProcessShare, process_id: int, there: int) -> None:
    """Refuses a process whose devices are not exactly its share of the layout.

    The meshes take devices in the order of the processes: with more than its share on one process,
    those of the next would stay unused, and the roles would not be where the processes expect them.

    Args:
      there: devices that JAX has on this process.

    Raises:
      ConfigError: names the process, its share and the number of its devices.
    """
    if there != share.devices:
        raise ConfigError(
            f"process {process_id} has {there} devices, and its share of the layout is "
            f"{share.devices} ({share.attention} attention + {share.ffn} ffn): with several "
            "processes, each must have exactly its share. Change the sizes of the roles or "
            "--processes, give each process its part of both roles (attention.processes and "
            "ffn.processes = --processes), or show the process fewer devices "
            "(CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS)"
        )


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


def leave(peers: Peers | None, code: int = 0) -> NoReturn:
    """Takes this process out of the deployment in order, and ends it.

    The leader shuts the deployment down here and goes last; followers come here when their
    `boundaries()` have ended. (JAX would abort a follower that is still connected when the leader
    goes.) The process ends without the interpreter's own finalisation: that kills daemon threads
    where they are, and one inside a device call, as for a step that was cut off, takes the process
    down with SIGABRT.
    """
    if isinstance(peers, Leader):
        peers.close()
    jax.distributed.shutdown()
    if isinstance(peers, Follower):
        peers.close()
    _exit(code)


def abandon(
    reason: str | BaseException, code: int | None = None, *, peers: Peers | None = None
) -> NoReturn:
    """Logs why and ends the process at once, whatever its other threads are stuck in.

    For the end after a failure: device calls that wait for a dead peer never return, and an
    orderly exit would wait for them.

    Args:
      reason: what to say; of an error that is no `JaxserveError`, the traceback is logged as well.
      code: exit code; None: 2 for a wrong configuration or checkpoint, the one of a `SystemExit`,
        otherwise 1.
      peers: who is told the reason: the followers of a leader, the leader of a follower.
    """
    text = reason if isinstance(reason, str) else describe(reason)
    if isinstance(reason, Exception) and not isinstance(reason, JaxserveError):
        logger.critical("%s", text, exc_info=reason)
    else:
        logger.critical("%s", text)
    if isinstance(peers, Leader):
        peers.close(failure=text, timeout=_LAST_WORDS_SECONDS)
    elif isinstance(peers, Follower):
        peers.fail(text)
    _exit(_exit_code(reason) if code is None else code)


def describe(error: BaseException) -> str:
    """An error in one line: our own speak for themselves, of others the type is named."""
    if isinstance(error, JaxserveError):
        return str(error)
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"stopped by {signal.Signals(error.code - 128).name}"
    return f"{type(error).__name__}: {error}"


def _exit_code(reason: str | BaseException) -> int:
    match reason:
        case ConfigError() | CheckpointError():
            return 2
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
    return 1


def _exit(code: int) -> NoReturn:
    for stream in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)

"""Joins this process to a deployment (control plane, devices, `jax.distributed`) and ends it.

Called first by every entry point of `serve`, before anything that might start a JAX backend;
importing it starts none. With several processes, everything happens inside `joined`:

1. The processes meet over the control plane (`leader.py`, `follower.py`).
2. `devices.initialise` sets the devices and calls `jax.distributed.initialize`. Not earlier: JAX
   aborts a process whose peers do not come, without an error that could be caught.
3. The block runs. When it ends, `leave` ends the process; after an exception, `abandon` does, and
   tells the others why. Neither returns (`process_end.py` says why).
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
import msgspec

from jaxserve.checkpoint.int8_products import listed
from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import Cluster
from jaxserve.errors import EngineFailedError, JaxserveError
from jaxserve.fleet.agreement import deployment_facts
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.control import PROTOCOL, Identity
from jaxserve.fleet.devices import initialise, installed_versions, log_devices
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.membership import process_shares
from jaxserve.fleet.process_end import alone, describe, end, exit_code_of, log_end
from jaxserve.link.session.channel import split_address
from jaxserve.link.session.hello import facts_digest

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.1


def unreachable(address: str, seconds: float = 0.0) -> str:
    """Returns why no connection to `host:port` succeeds, empty if one does.

    Args:
      seconds: Time in which it tries again; 0: it tries once.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                return f"{error}"
            time.sleep(_PAUSE_SECONDS)
        else:
            return ""


logger = logging.getLogger(__name__)

Peers = Leader | Follower
"""This process's end of the control plane."""

_LAST_WORDS_SECONDS = 1.0
"""For followers to read why the leader gives up, before its connection closes."""


def identity(process_id: int, processes: int, deployment: Deployment, role: str = "") -> Identity:
    """Describes this process when it joins.

    The weights are compared later (`Leader.begin_warm_up`), when all files are hashed.

    Raises:
      CheckpointError: The model folder cannot be read.
    """
    role = process_shares(deployment, processes, role)[process_id].role
    host = socket.gethostname()
    facts = {"control protocol": str(PROTOCOL), "--processes": str(processes)}
    facts |= installed_versions() | deployment_facts(deployment)
    return Identity(
        worker=f"process {process_id} ({role}, host {host}, pid {os.getpid()})",
        facts=facts,
        digest=facts_digest(facts),
        process_id=process_id,
        host=host,
        processes=processes,
    )


@contextlib.contextmanager
def joined(
    arguments: ProcessArguments,
    deployment: Deployment,
    *,
    on_failure: Callable[[EngineFailedError, Peers], None] = lambda failure, peers: abandon(
        failure, peers=peers
    ),
    on_drain: Callable[[str, Leader], None] = lambda reason, leader: None,
) -> Iterator[Peers | None]:
    """This process as part of its deployment, JAX initialised: its `Leader` or `Follower`.

    With several processes, the end of the block is the end of the process, by `leave` or, after an
    exception of any kind, by `abandon`. The block gets None in the only process of a runtime. It
    then goes on behind the block as usual, or ends with it where roles have runtimes of their own
    (`link.transport: pull`).

    Args:
      on_failure: called once, from a thread of the control plane, when another process is gone or
        stuck; the main thread may be inside a device call. Without it, the process is abandoned.
      on_drain: called once on the leader, likewise, when a follower was asked to end; says which.

    Raises:
      ConfigError: the layout does not divide over the processes.
    """
    if deployment.topology.crosses_runtimes and arguments.processes == 1:
        with alone(arguments, deployment):
            yield None
        return
    if arguments.processes == 1:
        initialise(arguments, deployment)
        log_devices()
        yield None
        return
    peers = _end_of_the_control_plane(arguments, deployment, on_failure, on_drain)
    try:
        if isinstance(peers, Leader):
            peers.start()
            peers.wait_registered()
        else:
            peers.register()
            peers.wait_registered()
            coordinator = arguments.coordinator
            if why := unreachable(coordinator, deployment.cluster.meeting_seconds):
                raise EngineFailedError(
                    f"registered but cannot reach {coordinator} (process 0, JAX's coordination): "
                    f"{why}"
                )
        initialise(arguments, deployment)
        log_devices()
        yield peers
    except BaseException as error:
        abandon(cause_of(error, peers), peers=peers)
    leave(peers)


def cause_of(error: BaseException, peers: Peers) -> BaseException:
    """Returns an error's cause: a transfer may have broken because another process is gone."""
    if isinstance(peers, Follower):
        peers.fail(describe(error))
    if not isinstance(error, Exception) or isinstance(error, JaxserveError):
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
    processes, role = arguments.processes, arguments.role
    here = identity(arguments.process_id, processes, listed(deployment), role)
    if arguments.is_leader:
        leader = Leader(
            here,
            address=arguments.control_bind or arguments.control_address,
            token=arguments.token,
            cluster=leader_deadlines(deployment),
            roles=[share.role for share in process_shares(deployment, processes, role)],
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


def leader_deadlines(deployment: Deployment) -> Cluster:
    """Returns the deadlines by which a leader judges its followers. Over `pull` a step may also
    wait for an ffn worker that begins anew, as long as the deployment allows."""
    cluster, pull = deployment.cluster, deployment.topology.crosses_runtimes
    longest = cluster.step_seconds + (deployment.link.absent_seconds if pull else 0)
    return msgspec.structs.replace(cluster, step_seconds=longest)


def leave(peers: Peers) -> NoReturn:
    """Takes this process out of the deployment in order, and ends it.

    The leader shuts the deployment down here and goes last; followers come here when their
    `boundaries()` have ended. (JAX would abort a follower that is still connected when the leader
    goes.)
    """
    if isinstance(peers, Leader):
        peers.close()
    jax.distributed.shutdown()
    if isinstance(peers, Follower):
        peers.close()
    end(0)


def abandon(
    reason: str | BaseException, code: int | None = None, *, peers: Peers | None = None
) -> NoReturn:
    """Logs why and ends the process at once, whatever its other threads are stuck in.

    For the end after a failure: device calls that wait for a dead peer never return, and an
    orderly exit would wait for them.

    Args:
      reason: what to say; of an error that is no `JaxserveError`, the traceback is logged as well.
      code: exit code; None: that of `errors.exit_code` for a wrong configuration or checkpoint, the
        one of a `SystemExit`, otherwise 1.
      peers: sessions to report the reason to: the followers of a leader, the leader of a follower.
    """
    text = log_end(reason)
    if isinstance(peers, Leader):
        peers.close(failure=text, timeout=_LAST_WORDS_SECONDS)
    elif isinstance(peers, Follower):
        peers.fail(text)
    end(exit_code_of(reason) if code is None else code)

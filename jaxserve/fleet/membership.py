"""Number of this process in its deployment, devices of each process, and facts that all processes
must agree on.

Pure arithmetic for `devices.py` and the runtimes of single roles. Knows nothing of JAX, sockets or
command lines: `arguments.py` reads them.
"""

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError


class ProcessArguments(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Who this process is among the processes of a deployment."""

    process_id: int = 0
    processes: int = 1
    role: str = ""
    """Which role this process is meant to play; empty: whatever the deployment gives it."""
    worker: int = 0
    """Number of this worker among those of its role in a fleet."""
    stand_in: bool = False
    """True if the worker plays the other role until a router says otherwise."""
    devices: int | None = None
    """The most devices that its role may have here; None: as many as the deployment says."""
    host_processes: int = 1
    """Processes on this host; with more than 1 the numbers above are those of the hosts."""
    host_process: int | None = None
    """Number of this process among those that share the devices of its host; None: none do."""
    coordinator: str = ""
    """`host:port` of JAX's coordination service, which process 0 starts."""
    control_address: str = ""
    """`host:port` of the leader's control plane."""
    control_bind: str = ""
    """Where the leader listens; empty: at `control_address`. Differs behind a service name."""
    local_device_ids: tuple[int, ...] | None = None
    """Accelerators of the host that belong to this process; None: all."""
    token: str = ""

    @property
    def is_leader(self) -> bool:
        return self.process_id == 0

    def __repr__(self) -> str:
        hidden = msgspec.structs.replace(self, token="…" if self.token else "")
        return msgspec.Struct.__repr__(hidden)


class ProcessShare(msgspec.Struct, frozen=True):
    """The part of the deployment's devices that one process owns."""

    attention: int
    ffn: int

    @property
    def devices(self) -> int:
        return self.attention + self.ffn

    @property
    def role(self) -> str:
        """`attention`, `ffn`, or both."""
        return " and ".join(name for name in ("attention", "ffn") if getattr(self, name))


def process_shares(
    deployment: Deployment, processes: int, role: str = ""
) -> tuple[ProcessShare, ...]:
    """How the devices of a runtime divide over its processes, in process order.

    One process has all. Otherwise attention lives on the first a processes and ffn on the rest,
    where a divides both evenly; of several such a, the one with the most equal processes. Each has
    an equal part of both roles where that is asked for, or nothing else divides
    (`Deployment.shares_processes`).
    Every attention process has its part of every domain. A colocated deployment has its one mesh on
    all processes, and so has a role with a runtime of its own.

    Args:
      role: role of the runtime, where roles have runtimes of their own.

    Raises:
      ConfigError: nothing divides evenly; the message shows the arithmetic.
    """
    roles = deployment.attention, deployment.ffn
    attention, ffn = (role.devices for role in roles)
    domains = deployment.runtime_domains
    sizes = (
        f"attention dp {roles[0].dp} × tp {roles[0].tp} = {attention} devices"
        + (f" of each of {domains} domains" if domains > 1 else ""),
        f"ffn ep {roles[1].ep} × tp {roles[1].tp} = {ffn} devices",
    )
    if deployment.topology.has("colocated") or (role and deployment.topology.crosses_runtimes):
        of_ffn = role == "ffn"
        if (attention, ffn)[of_ffn] % processes:
            raise ConfigError(f"{sizes[of_ffn]} do not divide evenly over {processes} processes")
        share = (0, ffn // processes) if of_ffn else (attention // processes, 0)
        return (ProcessShare(*share),) * processes
    if processes == 1:
        return (ProcessShare(domains * attention, ffn),)
    if deployment.shares_processes(processes):
        return (ProcessShare(domains * attention // processes, ffn // processes),) * processes
    a, f = roles[0].processes, roles[1].processes
    if a and f:
        if a + f != processes:
            raise ConfigError(
                f"attention.processes {a} + ffn.processes {f} = {a + f}, but --processes is "
                f"{processes}"
            )
    elif fitting := deployment.separate_splits(processes):
        a, f = min(fitting, key=lambda split: abs(domains * attention / split[0] - ffn / split[1]))
    else:
        splits = [(first, processes - first) for first in range(1, processes)]
        tried = ", ".join(f"{attention}/{a} and {ffn}/{f}" for a, f in splits)
        works = [
            str(count)
            for count in range(2, attention + ffn + 1)
            if deployment.separate_splits(count) or deployment.shares_processes(count)
        ]
        raise ConfigError(
            f"{sizes[0]} and {sizes[1]} do not divide evenly over {processes} processes, the "
            f"first for attention and the rest for ffn: {tried}; nor does each process get the "
            f"same part of both: {attention}/{processes} and {ffn}/{processes}. Numbers of "
            f"processes that work: 1, {', '.join(works)}"
        )
    return (ProcessShare(domains * attention // a, 0),) * a + (ProcessShare(0, ffn // f),) * f

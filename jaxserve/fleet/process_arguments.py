"""Which process of a deployment this is. `arguments.py` reads it from flags and the environment."""

import msgspec


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

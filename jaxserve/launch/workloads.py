"""Workloads of a deployment: for each role a number of equal workers with equal processes; and TPU
slices as Google Cloud rents and names them.

Called by `__main__.py`; the renderers in the other files turn workloads into what a cluster takes.
Pure arithmetic on a deployment: no JAX, no cluster.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.config.sections import AttentionRole, FFNRole
from jaxserve.errors import ConfigError
from jaxserve.fleet.membership import process_shares
from jaxserve.planner.hardware import LARGEST_SLICE, Hardware, TpuNames, load_hardware


class TpuSlice(NamedTuple):
    """A slice: `hosts` machines of `chips_per_host` chips each."""

    kind: TpuNames
    topology: str
    hosts: int
    chips_per_host: int

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def accelerator_type(self) -> str:
        """Name of the slice in `gcloud compute tpus`, like `v6e-64`."""
        return f"{self.kind.slice_type}-{self.chips * self.kind.counts}"


def tpu_slice(name: str, hardware: Hardware, devices: int) -> TpuSlice:
    """Returns the slice with this number of JAX devices.

    Args:
      name: name of the hardware, for messages.
      hardware: a JAX device of it.
      devices: JAX devices, of which a chip may have two.

    Raises:
      ConfigError: no such slice exists, or the last chip is not whole; lists the existing slices.
    """
    if hardware.tpu is None:
        raise ConfigError(f"hardware {name}: its file does not say how clusters name it (`tpu`)")
    flat, cores = hardware.torus == 2, hardware.jax_devices
    chips = devices // cores
    if not hardware.slice_of(devices):
        powers = (1 << power for power in range(LARGEST_SLICE.bit_length()))
        known = [str(power) for power in powers if hardware.slice_of(power * cores)]
        more = "" if flat else ", and other multiples of 64"
        raise ConfigError(
            f"{devices / cores:g} chips of {name}: there are slices of {', '.join(known)}{more}"
        )
    sizes = hardware.shape(devices)
    whole = chips if flat and chips <= 8 else 4
    # A dimension of one chip comes last: 2x2x1.
    text = "x".join(map(str, sizes if sizes[0] > 1 else sizes[::-1]))
    return TpuSlice(hardware.tpu, text, chips // whole, whole)


WORKER_PORT, FFN_PORT, COORDINATOR_PORT, CONTROL_PORT = 9100, 9000, 9001, 9002
"""Ports on which workers listen for routers, ffn workers for attention workers, and process 0 of a
worker for its other processes."""
PORTS = "9110-9199"
"""`cluster.ports`: all other ports that processes open to each other. Together 9000 to 9199."""

Kind = Literal["whole", "router", "prefill", "domain", "attention", "ffn"]


class Workload(NamedTuple):
    """Equal workers of one role.

    Attributes:
      kind: `whole`: the deployment is one runtime, which serves clients itself; `attention`: an
        attention runtime that does.
      role: for `--role`; empty: none is needed.
      workers: number of workers, each with its own processes.
      processes: processes of each worker; the first one leads.
      devices: JAX devices of each process; 0: it needs none.
      hardware: one JAX device of a process; None: processors.
      hardware_name: name in `configs/hardware`.
      port: port on which process 0 of a worker listens for other workloads; 0: none.
      slices: TPU slices that a worker's processes are divided over.
      host_gib: memory of a pod's host in GiB, see `checked.with_host_memory`.
    """

    kind: Kind
    role: str
    workers: int
    processes: int
    devices: int
    hardware: Hardware | None
    hardware_name: str
    port: int = 0
    slices: int = 1
    host_gib: int = 16

    @property
    def faces(self) -> bool:
        """True if process 0 of the workload serves clients."""
        return self.kind in ("whole", "router", "attention")

    @property
    def accelerators(self) -> int:
        """Chips or GPUs of each process."""
        return 0 if self.hardware is None else self.devices // self.hardware.jax_devices

    @property
    def tpu(self) -> TpuSlice | None:
        """Each of the slices of a worker, where it runs on TPUs."""
        if self.hardware is None or self.hardware.platform != "tpu":
            return None
        devices = self.devices * self.processes // self.slices
        return tpu_slice(self.hardware_name, self.hardware, devices)


def host_processes(deployment: Deployment, work: Workload) -> list[str]:
    """The argument by which each process that is started runs one for every GPU that it has, in a
    runtime with both roles: the host time of a layer grows with the devices of a process
    (docs/measurements/serving.md)."""
    alone = work.hardware is not None and work.hardware.process_devices == 1
    all_roles = work.role in ("", "decode", "prefill")
    if not (alone and all_roles and work.devices > 1):
        return []
    if deployment_of(deployment, work.role).topology.has("colocated"):
        return []
    return [f"--host-processes={work.devices}"]


def serve_arguments(
    deployment: Deployment,
    work: Workload,
    given: Sequence[str] = (),
    config: str = "/etc/jaxserve/deployment.yaml",
) -> list[str]:
    """Arguments of `python -m jaxserve.serve` that all processes of a worker share.

    Args:
      given: those that say which worker it is, or where it listens.
    """
    role = [f"--role={work.role}"] if work.role else []
    own = host_processes(deployment, work)
    return [f"--config={config}", "--log-format=json", *role, *given, *own]


def workloads(
    deployment: Deployment,
    hardware: str = "",
    slices: int = 1,
    processes_of: Callable[[int, Hardware | None, str], int] | None = None,
) -> list[Workload]:
    """The workloads of a deployment, the router first.

    Args:
      hardware: name of what roles run on that say nothing themselves; empty: processors.
      slices: TPU slices of a runtime that has all roles.
      processes_of: devices of a worker, their hardware and its name → its processes; by default a
        process a host.

    Raises:
      ConfigError: hosts or slices do not divide the devices, or a runtime cannot be started so.
    """
    count = processes_of or processes_on_hosts
    pull = deployment.topology.crosses_runtimes
    apart = deployment.topology.separates_domains
    prefill = deployment.prefill
    fleet = bool(prefill.workers or deployment.fleet.domains or (apart and deployment.domains > 1))
    if slices > 1 and (fleet or pull):
        raise ConfigError(
            f"--slices {slices}: a runtime over several slices has all roles; of this deployment "
            "each worker takes a slice of its own"
        )
    if not fleet and not pull:
        whole = _runtime(deployment, hardware, count, slices)
        return [_workload("whole", "", 1, whole, slices=slices)]
    found = []
    if fleet:
        found.append(_workload("router", "router", 2, _Runtime(1, 0, None, "")))
    if prefill.workers:
        own = deployment_of(deployment, "prefill")
        if own.topology.crosses_runtimes:
            raise ConfigError(
                "prefill.mode: over link.transport = pull prefill workers would need ffn workers "
                "of their own; say prefill.mode: colocated"
            )
        runtime = _runtime(own, hardware, count, 1)
        found.append(_workload("prefill", "prefill", prefill.workers, runtime, WORKER_PORT))
    if not pull:
        domains = deployment.domains if apart else _cells(deployment)
        runtime = _runtime(deployment, hardware, count, 1)
        return [*found, _workload("domain", "decode", domains, runtime, WORKER_PORT)]
    runtime = _role("attention", deployment.attention, hardware)
    if fleet:
        found.append(_workload("domain", "attention", deployment.domains, runtime, WORKER_PORT))
    else:
        found.append(_workload("attention", "attention", 1, runtime))
    runtime = _role("ffn", deployment.ffn, hardware, deployment.ffn.instances)
    workers = len(deployment.link.addresses) // runtime.processes
    found.append(_workload("ffn", "ffn", workers, runtime, FFN_PORT))
    return found


class _Runtime(NamedTuple):
    """Processes of a worker, JAX devices of each, and what they run on."""

    processes: int
    devices: int
    hardware: Hardware | None
    hardware_name: str


def _workload(
    kind: Kind, role: str, workers: int, runtime: _Runtime, port: int = 0, slices: int = 1
) -> Workload:
    return Workload(
        kind=kind,
        role=role,
        workers=workers,
        processes=runtime.processes,
        devices=runtime.devices,
        hardware=runtime.hardware,
        hardware_name=runtime.hardware_name,
        port=port,
        slices=slices,
    )


def processes_on_hosts(devices: int, hardware: Hardware | None, name: str) -> int:
    """Returns how many hosts a worker's devices take, with one process on each."""
    if hardware is None:
        return 1
    if hardware.platform == "tpu":
        return tpu_slice(name, hardware, devices).hosts
    host = hardware.devices_per_host
    if devices > host and devices % host:
        raise ConfigError(f"{devices} devices do not fill hosts of {host} {hardware.name}")
    return max(1, devices // host)


def processes_on_devices(devices: int, hardware: Hardware | None, name: str) -> int:
    """Returns one process a device, as Slurm starts them."""
    return devices


def one_process(devices: int, hardware: Hardware | None, name: str) -> int:
    """Returns one process, which has all devices of a worker."""
    return 1


def _runtime(
    deployment: Deployment,
    hardware: str,
    count: Callable[[int, Hardware | None, str], int],
    slices: int,
) -> _Runtime:
    """The processes of a runtime with all roles."""
    attention, ffn = deployment.attention, deployment.ffn
    name = attention.hardware or hardware
    if deployment.topology.has("ffn") and (ffn.hardware or hardware) != name:
        raise ConfigError(
            f"attention.hardware = {name or 'none'} and ffn.hardware = "
            f"{ffn.hardware or hardware or 'none'}: one runtime runs on one kind"
        )
    kind = load_hardware(name) if name else None
    devices = deployment.devices
    if devices % slices:
        raise ConfigError(f"--slices {slices} do not divide the {devices} devices of the layout")
    processes = slices * count(devices // slices, kind, name)
    both = deployment.shares_processes(processes)
    if deployment.topology.has("ffn") and attention.processes and ffn.processes and not both:
        processes = attention.processes + ffn.processes
    shares = {share.devices for share in process_shares(deployment, processes)}
    if len(shares) > 1 or processes % slices:
        raise ConfigError(
            f"{processes} processes on {slices} slice(s) would have {sorted(shares)} devices each: "
            "processes of one workload are equal; change the sizes of the roles, or give each its "
            "part of both (attention.processes and ffn.processes = their number)"
        )
    return _Runtime(processes, shares.pop(), kind, name)


def _role(name: str, role: AttentionRole | FFNRole, hardware: str, instances: int = 1) -> _Runtime:
    """Returns the processes of a worker whose role has a runtime of its own, or several of which
    each has an equal part of its devices."""
    hardware, processes = role.hardware or hardware, max(1, role.processes)
    devices = role.devices // instances
    kind = load_hardware(hardware) if hardware else None
    hosts = processes_on_hosts(devices, kind, hardware)
    tpu = kind is not None and kind.platform == "tpu"
    if hosts > processes or (tpu and hosts != processes):
        raise ConfigError(
            f"{name}.processes = {role.processes}: {devices} of {hardware} are on {hosts} "
            f"hosts, each with a process of its own"
        )
    return _Runtime(processes, devices // processes, kind, hardware)


def _cells(deployment: Deployment) -> int:
    """Workers that have all roles, where a fleet names them."""
    fleet = deployment.fleet
    return max(1, len(fleet.domains)) if fleet.registry == "static" else 1

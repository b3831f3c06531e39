"""This process's devices: its share of the layout, simulated ones on CPUs, and `jax.distributed`.

Called before anything that might start a JAX backend; importing it starts none. Processes of one
deployment meet before (`bootstrap.py`).

What JAX does when a peer dies (0.11.2 and 0.12, measured): by default its coordination service
makes every process abort, the leader included, heartbeat_timeout_seconds after a follower's death.
With `jax_enable_recoverability` the leader lives on. A follower is aborted at once when the
leader's service is gone, which no option prevents; `_delay_abort` gives it time to say why.
"""

import ctypes
import logging
import math
import os
import signal
import subprocess
from importlib.metadata import distributions

import jax

import jaxserve
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.fleet.hardware import choose_platform
from jaxserve.fleet.membership import ProcessArguments, ProcessShare, process_shares
from jaxserve.link.session.channel import split_address
from jaxserve.ports import free_port, is_loopback

logger = logging.getLogger(__name__)

_JAX_HEARTBEAT_SECONDS = 100
"""JAX's own default. Ours are shorter, so that ours is the error that is seen."""
_UNTUNED = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "false"}
_LARGEST_POOL = 0.95
"""Part of a card; CUDA's context and the compiler need the rest."""
_PACKAGES = ("jax", "jaxlib", "libtpu", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def initialise(arguments: ProcessArguments, deployment: Deployment) -> ProcessShare:
    """Gives this process its devices and, with several, joins them with `jax.distributed`.

    With several processes call it once all have registered with the leader: then every peer is
    there, and a failure of `jax.distributed.initialize` is one of the network.

    Raises:
      ConfigError: the layout does not divide over the processes, this process has another number
        of devices than its share of the layout, JAX has already started with too few CPU devices,
        or processes with CPU devices are on several hosts.
    """
    share = own_share(arguments, deployment)
    if jax.distributed.is_initialized():  # when it was a spare (`prepared.py`)
        return share
    platform = choose_platform()
    if platform == "cpu":
        _set_cpu_devices(share, alone=arguments.processes == 1)
    elif platform == "cuda":
        same = process_shares(deployment, arguments.processes, arguments.role).count(share)
        _set_gpu_options(share, deployment, several=same > 1)
    if arguments.processes == 1:
        return share
    host, _ = split_address(arguments.coordinator, "--coordinator")
    here = _own_loopback(host) if platform == "cpu" else ""
    seconds = math.ceil(deployment.cluster.meeting_seconds)
    # A dead peer must not take this process along: we say who died, answer clients, then exit.
    jax.config.update("jax_enable_recoverability", True)
    # JAX's preemption service would catch the SIGTERM that starts our own drain.
    jax.config.update("jax_enable_preemption_service", False)
    if platform == "cpu" and share.devices > 1:
        # A collective among simulated devices holds a thread of the CPU client's pool for each
        # device, and the pool has max(cores, devices) threads. Transfers from other processes wait
        # in the same pool: with two cores, four devices and four lanes a collective was seen to
        # wait for a thread for ever. XLA takes the number of cores from NPROC where that is set.
        os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 4 * share.devices))
    if here:
        jax.config.update("jax_cross_host_transfer_socket_address", f"{here}:{free_port(here)}")
        # JAX binds every connection to this address: a fixed port would end the process.
        jax.config.update("jax_cross_host_transport_addresses", f"{here}:0")
        jax.config.update("jax_cross_host_transfer_timeout_seconds", seconds)
    jax.distributed.initialize(
        coordinator_address=arguments.coordinator,
        num_processes=arguments.processes,
        process_id=arguments.process_id,
        local_device_ids=_own_devices(arguments, deployment),
        cluster_detection_method="deactivate",
        initialization_timeout=seconds,
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


def installed_versions() -> dict[str, str]:
    """Returns versions that all processes of a runtime must share, by package: the first ones on
    Python's path, which are imported."""
    found = [one for name in _PACKAGES for one in [*distributions(name=name)][:1]]
    return {"jaxserve": jaxserve.__version__, **{one.name: one.version for one in found}}


def log_devices() -> None:
    """Logs the devices of this process and the versions. JAX starts its backend."""
    devices, versions = jax.local_devices(), installed_versions()
    logger.info("devices: %d × %s; versions: %s", len(devices), devices[0].device_kind, versions)


def _own_devices(arguments: ProcessArguments, deployment: Deployment) -> tuple[int, ...] | None:
    """Returns the numbers of the host's accelerators that belong to this process; None: all. Raises
    ConfigError if processes of one host share its TPU chips."""
    number, platform = arguments.host_process, choose_platform()
    if number is None or platform == "cpu":
        return arguments.local_device_ids
    if platform == "tpu":
        raise ConfigError("--host-processes: on TPUs a host has one process")
    shares = process_shares(deployment, arguments.processes, arguments.role)
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
    if deployment.topology.crosses_runtimes and role not in ("attention", "ffn"):
        raise ConfigError(
            f"link.transport = {deployment.link.transport}: attention and ffn have a runtime "
            "each, so say which one this is: --role attention or --role ffn (now "
            f"{role or 'none'})"
        )
    share = process_shares(deployment, arguments.processes, role)[arguments.process_id]
    played = "colocated" if deployment.topology.has("colocated") else share.role
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


MOST_SIMULATED = 64
"""CPU devices of one process; more take many minutes to start."""


def _set_cpu_devices(share: ProcessShare, alone: bool) -> None:
    """Makes the simulated CPU devices of this process: its share, or alone at least its share.
    Raises ConfigError beyond `MOST_SIMULATED`, or if JAX has already started with too few."""
    if share.devices > MOST_SIMULATED:
        raise ConfigError(
            f"this process needs {share.devices} devices ({share.attention} attention + "
            f"{share.ffn} ffn), and a CPU simulates at most {MOST_SIMULATED}"
        )
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


def _set_gpu_options(share: ProcessShare, deployment: Deployment, several: bool) -> None:
    """Sets variables that XLA and JAX read once, in all compilations, unless they are set already.

    Args:
      several: whether other processes play the same role.

    By default XLA divides autotuning over all processes that compile at the same time, and each
    waits up to 24 hours for the results of the others (openxla/xla#16153). Processes of another
    role compile other programs, so their results never come.

    Processes that tune apart may choose other algorithms, whose programs may order collectives in
    another way (openxla/xla#7716): they would wait for each other for ever. So where several
    processes play one role, nothing is tuned, and XLA's products are cuBLAS's first choice. Equal
    versions and cards then compile equal programs without a message. The alternative,
    `jax_share_binary_between_hosts`, waits 20 minutes for a program that the lowest process had in
    its own compile cache and therefore never sends.

    NCCL gives up collectives with a process that JAX's service has lost, so that a device is not
    busy with them for ever. Long before (`cluster.heartbeat_seconds`) the leader has said which
    process is gone, and all processes of the runtime have ended.

    NCCL's kernels take no more multiprocessors than grids of matrix products leave free
    (`pallas_kernels/target.py`).

    JAX's memory pool is 75 % of a card by default; here it is the larger `memory_gb` of the roles
    that this process has.
    """
    given = os.environ.get("XLA_FLAGS", "")
    wanted = {"xla_gpu_shard_autotuning": "false"} | (_UNTUNED if several else {})
    more = [f"--{name}={value}" for name, value in wanted.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *more])
    os.environ.setdefault("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "1")
    os.environ.setdefault("NCCL_MAX_CTAS", "8")
    played = [role for role in deployment.topology.roles if getattr(share, role)]
    sizes = [getattr(deployment, role).memory_gb for role in played]
    if all(sizes) and (card := _card_bytes()):
        part = min(max(sizes) * 1e9 / card, _LARGEST_POOL)
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{part:.4f}")


def _card_bytes() -> int | None:
    """Bytes of this host's smallest GPU, by the driver; None if `nvidia-smi` does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return min(map(int, told.stdout.split())) << 20
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("memory_gb: nvidia-smi failed (%s): JAX's pool is 75 %% of a card", error)
        return None


def _delay_abort() -> None:
    """Lets this process live some seconds longer when JAX aborts it because the leader is gone.

    JAX's client calls abort() on a thread of its own, a moment after the leader's connection
    closes, and before our own error could be seen. With libc's `sleep` as the handler of SIGABRT
    that thread sleeps (its argument, the signal's number, is 6: six seconds) and aborts then,
    while ours says what happened and exits. `sleep` is async-signal-safe.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _own_loopback(host: str) -> str:
    """Returns the address at which JAX of this process listens for arrays of others, which are on
    this host, an IPv6 one in brackets. Four bytes of a stranger end a process at such a port, and
    there is no other way between CPUs; accelerators exchange arrays over fabrics of their own.

    Raises:
      ConfigError: `host` is not this one.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"--coordinator {host}: on CPUs the processes of a runtime exchange arrays over ports "
            "that any stranger can break, so they must be on one host (127.0.0.1). Runtimes of one "
            "process each, with link.transport = pull, may be on several"
        )
    return "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host

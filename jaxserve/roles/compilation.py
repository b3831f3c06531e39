"""Describes the programs of a worker, compiles each once, and keeps them for later processes.

A program is a function over device slices with the options that it is compiled with. On GPUs, a
flag set in XLA_FLAGS keeps that value in all programs.

Processes of a host share a folder of compiled programs. Hosts may share a folder or a bucket
(`gs://`, `s3://`). A reader never sees part of an entry.
"""

import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import msgspec
from jax._src import compilation_cache, compilation_cache_interface, compiler, lru_cache
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.config.model import FFN, LayerKind
from jaxserve.errors import CheckpointError, EngineFailedError
from jaxserve.progress import Progress
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.storage.bucket import ByteSpan, StorageBucket, is_url
from jaxserve.storage.files import write_whole
from jaxserve.storage.mirror import user_cache

CudaGraphs = Literal["default", "off", "branches"]
"""How XLA turns consecutive kernels of a program into command buffers, which are CUDA graphs. A
graph keeps the addresses of its kernels' arguments: a call with others records every node again.

`default`: XLA decides.

`off`: for programs that a step runs once a layer, with other weights, pages and messages at every
call. Launching the 22 to 24 kernels of a layer of Step-3 should cost the host less than recording
them and launching the graph; this was not timed on a card.

`branches`: for programs with the sampler, whose arguments mostly keep their addresses. Conditions
and loops become nodes, too (drivers for CUDA 12.3 and later). Outside a graph the host waits at
every condition until the device has finished everything before, and cannot enqueue the next step.
Without the condition that skips all draws, a greedy step of 128 slots would run some 2,000 nodes
more: 3.4 ms at the 1.7 µs that the estimate charges for each."""

_ON_CPU = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}
"""Restricts YNNPACK to matrix products, which XLA:CPU leaves to it by default. In reductions of
4,096 elements and more it would add in another order than XLA does in smaller ones, so that a
token's norms and softmaxes would depend on the number of tokens in its step. Vectors have the full
width of the CPU, which halves the instructions of a product (`pallas_kernels/input_major.py`)."""

_GRAPHS: Mapping[CudaGraphs, dict[str, Any]] = {
    "off": {"xla_gpu_enable_command_buffer": ""},
    "branches": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        "CONDITIONAL,WHILE"
    },
}
_RAGGED = {
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": True,
    "xla_gpu_ragged_all_to_all_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
"""For ragged all-to-alls between processes (jax 0.12), by which rows go to experts and experts
move. XLA's default is a kernel for the GPUs of one process; between processes a call fails. With
NCCL's sends and receives the host would wait for the device twice in each call. The device kernel
reads the numbers of rows itself and writes to other GPUs over NVLink and NICs: it needs NCCL 2.29,
and between hosts NICs that NCCL's GIN supports. It waits for rows from every device on other hosts,
but sends none if a device has none (`openxla/xla`, `ragged_all_to_all_device_kernel_lib`), so
`model/ffn/collectives.py` then sends one. It was never run on a card, so `serve` tests it first
(`commands/self_tests.py`). The scheduler runs work that needs no rows while they arrive."""

_SEVERAL = {"xla_gpu_memory_limit_slop_factor": 1000}
"""For a program of several lanes, or one that exchanges messages with another one: the memory, in
percent of the device's, above which XLA computes results twice to save space. It counts pages twice
that kernels write in place. It would gather rows twice (seen with two lanes on 8 H200), and receive
messages twice that are sent once (seen with Step-3 for 16 + 16 H200: 61 more on one side)."""


def compiler_options(
    platform: str, graphs: CudaGraphs = "default", ragged: bool = False, several: bool = False
) -> dict[str, Any]:
    """Returns the options that a program is compiled with.

    Args:
      ragged: whether the program has ragged all-to-alls between processes.
      several: whether the program has several lanes or exchanges messages with another one.
    """
    if platform == "cpu":
        return dict(_ON_CPU)
    if platform not in ("cuda", "gpu"):
        return {}
    wanted = _GRAPHS.get(graphs, {}) | (_RAGGED if ragged else {}) | (_SEVERAL if several else {})
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in wanted.items() if name not in given}


Arrays = tuple[Array, ...]
"""Inputs or results of a program that belong together, such as the leaves of a block."""

ROWS = PartitionSpec("dp")
PIECES = PartitionSpec(("dp", "tp"))
REPLICATED = PartitionSpec()


class Program(NamedTuple):
    """A function over device slices, ready to be compiled for its mesh."""

    name: str
    body: Callable[..., Any]
    """Takes one argument for each of `inputs`, in the same structure; returns flat arrays."""
    mesh: Mesh
    inputs: tuple[Any, ...]
    """Arrays, and trees of arrays that belong together: global shapes with their shardings."""
    out_specs: tuple[PartitionSpec, ...] | PartitionSpec
    donates: tuple[int, ...] = ()
    """Numbers of the inputs that the program may overwrite."""
    cuda_graphs: CudaGraphs = "default"
    ragged: bool = False
    """True if the program has ragged all-to-alls."""
    lanes: int = 1
    """Lanes whose steps a program of colocated mode runs."""
    paired: int = 0
    """Devices of the attention role, if the program exchanges messages with the other role's."""

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Arrays of the inputs in flat order, as arguments of the compiled program."""
        return tuple(jax.tree.leaves(self.inputs))

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the donated arguments."""
        inputs = [number for number, one in enumerate(self.inputs) for _ in jax.tree.leaves(one)]
        return tuple(place for place, number in enumerate(inputs) if number in self.donates)

    def mapped(self) -> Callable[..., Any]:
        """The function over whole arrays in place of device slices, with flat arguments."""
        form = jax.tree.structure(self.inputs)

        def of_slices(*arguments: Array) -> Any:
            return self.body(*jax.tree.unflatten(form, arguments))

        specs: list[Any] = [argument.sharding for argument in self.arguments]
        mapped = jax.shard_map(
            of_slices,
            mesh=self.mesh,
            in_specs=tuple(sharding.spec for sharding in specs),
            out_specs=self.out_specs,
            check_vma=False,
        )
        mapped.__name__ = self.name
        return mapped

    def compile(self) -> jax.stages.Compiled:
        """Compiles ahead of time for the shapes and shardings of its inputs."""
        lowered = jax.jit(self.mapped(), donate_argnums=self.donated).lower(*self.arguments)
        devices, several = list(self.mesh.devices.flat), self.paired > 0 or self.lanes > 1
        between = self.ragged and len({device.process_index for device in devices}) > 1
        options = compiler_options(devices[0].platform, self.cuda_graphs, between, several)
        return lowered.compile(options or None)


PROGRAM_SECONDS = 60.0
"""Longest wait at the end of a process for the program that it compiles."""

logger = logging.getLogger(__name__)


class ProgramKey(NamedTuple):
    """Names one program of a deployment."""

    name: str
    """Name of the function that makes it."""
    kind: LayerKind | FFN | str | int | None
    bucket: Bucket
    """Bucket of the program; 1 page or 1 token if it does not depend on pages or tokens."""

    @classmethod
    def of(cls, make: Callable[..., Program], bucket: Bucket, *kind: Any) -> "ProgramKey":
        """Names the program `make(programs, bucket, *kind)`; one kind at most."""
        return cls(make.__name__, kind[0] if kind else None, bucket)


class Get(Protocol):
    """Function through which a step's programs are listed once: a caller asks for the executable of
    `make(programs, bucket, *kind)`. `wanted` collects the programs, and returns nothing;
    `compile_steps` then returns their executables."""

    def __call__(self, make: Callable[..., Program], bucket: Bucket, *kind: Any) -> Any: ...


def wanted(
    steps: Callable[..., Any], programs: Any, sizes: Sequence[Any]
) -> dict[ProgramKey, Program]:
    """Collects the programs that `steps(programs, sizes, get)` asks for, each made once."""
    found: dict[ProgramKey, Program] = {}

    def get(make: Callable[..., Program], bucket: Bucket, *kind: Any) -> None:
        key = ProgramKey.of(make, bucket, *kind)
        if key not in found:
            found[key] = make(programs, bucket, *kind)

    steps(programs, sizes, get)
    return found


def compile_all[Key](
    programs: Mapping[Key, Program], workers: int = 2
) -> dict[Key, jax.stages.Compiled]:
    """Compiles all programs, `workers` at a time; the result has their order."""
    with (
        Progress("compile", len(programs), process=jax.process_index()) as progress,
        concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool,
    ):
        names = {pool.submit(program.compile): program.name for program in programs.values()}
        for future in concurrent.futures.as_completed(names):
            progress.advance(note=names[future])
    return {key: future.result() for key, future in zip(programs, names, strict=True)}


def compile_steps[Steps](steps: Callable[..., Steps], programs: Any, sizes: Sequence[Any]) -> Steps:
    """Compiles the programs that `steps(programs, sizes, get)` asks for; returns its result with
    these executables."""
    compiled = compile_all(wanted(steps, programs, sizes))
    return steps(programs, sizes, lambda *one: compiled[ProgramKey.of(*one)])


OnFailed = Callable[[EngineFailedError], object]


class StepCompiler:
    """Compiles the programs of steps by bucket, as `scheduler.compile_first` says: all at once, or
    first those of the smallest steps that suffice, and the others on a thread while the process
    serves.

    Args:
      steps: returns executables by bucket, as `compile_steps` calls it.
      programs: where the programs are made.
      options: names of the programs that only steps with options need.

    Attributes:
      executables: by bucket. If only a few are ready, the others are added later, one size at a
        time.
      token_budget: most tokens a DP group of a step that `fitted` finds a bucket for.
      takes_options: whether steps may have options; until then None stands for their programs.
    """

    def __init__(self, steps: Callable[..., Any], programs: Any, options: Sequence[str]):
        deployment = programs.deployment
        self._buckets = first = deployment_buckets(deployment)
        few = deployment.scheduler.compile_first == "few" and jax.process_count() == 1
        if few:
            least, pages = programs.slots * (1 + deployment.drafts), first[-1].pages
            size = next(one.tokens for one in first if one.tokens >= least)
            first = [one for one in first if (one.tokens, one.pages) == (size, pages)]
        self.token_budget = first[-1].tokens
        self._steps, self._programs, self._made = steps, programs, dict[ProgramKey, Any]()
        self._made |= compile_all(self._missing(first, options if few else ()))
        self.executables, self.takes_options = self._bound(first), not few
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, made: Callable[[], object], failed: OnFailed) -> None:
        """Begins to compile the missing programs. The thread calls `made` each time when more steps
        may run, or `failed` with the reason why no more will."""
        if not self.takes_options:
            self._thread = threading.Thread(None, self._run, "compile", (made, failed), daemon=True)
            self._thread.start()

    def fitted[Plan: Any](self, plan: Plan) -> Plan:
        """Returns a `StepPlan` with the smallest bucket whose programs are compiled."""
        if plan.bucket in self.executables:
            return plan
        fitting = (one for one in self._buckets if one in self.executables)
        bucket = next(one for one in fitting if one.holds(plan.bucket))
        return msgspec.structs.replace(plan, bucket=bucket)

    def close(self) -> None:
        """Ends the thread after the present program: the interpreter may not end inside XLA."""
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(PROGRAM_SECONDS)

    def _run(self, made: Callable[[], object], failed: OnFailed) -> None:
        sizes = sorted({one.tokens for one in self._buckets})
        try:
            for size in dict.fromkeys((self.token_budget, sizes[-1], *sizes)):
                some = [one for one in self._buckets if one.tokens == size]
                for key, program in self._missing(some).items():
                    if self._closed:
                        return
                    self._made[key] = program.compile()
                self.executables |= self._bound(some)
                self.token_budget = max(self.token_budget, size)
                self.takes_options = True
                made()
        except Exception as error:
            logger.exception("compilation after the start")
            failed(EngineFailedError(f"compilation after the start: {error}"))

    def _missing(self, some: Sequence[Bucket], but: Sequence[str] = ()) -> Mapping[Any, Program]:
        found = wanted(self._steps, self._programs, some).items()
        return {key: one for key, one in found if not (key in self._made or key.name in but)}

    def _bound(self, some: Sequence[Bucket]) -> dict[Bucket, Any]:
        return self._steps(self._programs, some, lambda *one: self._made.get(ProgramKey.of(*one)))


class WholeEntries(lru_cache.LRUCache):
    """JAX's cache, with entries that appear at once and unreadable ones replaced. JAX writes in
    place and never replaces: another process could read half an entry, and after a process died
    while writing one, every later start would warn and compile again."""

    def get(self, key: str) -> bytes | None:
        """Returns the entry; None if no readable one exists."""
        value = super().get(key)
        if value is not None and not _is_readable(key, value):
            self._file(key).unlink(missing_ok=True)
            return None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry unless it exists."""
        if self.eviction_enabled:  # under a lock of all processes
            super().put(key, value)
            return
        file = self._file(key)
        if not file.exists():
            write_whole(file, value)

    def _file(self, key: str) -> Path:
        return Path(str(self.path)) / f"{key}-cache"


class BucketEntries(compilation_cache_interface.CacheInterface):
    """Entries in a bucket, which replaces objects at once. If reading or writing there fails, the
    program is compiled."""

    def __init__(self, url: str):
        self._path = Path(url)
        self._bucket = StorageBucket(url)

    def get(self, key: str) -> bytes | None:
        """Returns the entry; None if no readable one exists."""
        try:
            (part,) = self._bucket.read([ByteSpan(f"{key}-cache")])
        except CheckpointError as error:
            logger.warning("compilation cache: %s", error)
            return None
        return part.data if part is not None and _is_readable(key, part.data) else None

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry."""
        try:
            self._bucket.write(f"{key}-cache", value)
        except CheckpointError as error:
            logger.warning("compilation cache: %s", error)


def _is_readable(key: str, value: bytes) -> bool:
    try:
        if not compilation_cache.decompress_executable(value):
            raise ValueError("empty")
    except Exception as error:  # zlib's, or one of two packages'
        logger.warning("compilation cache: %s cannot be read (%s) and is made again", key, error)
        return False
    return True


def keep_entries_whole() -> None:
    """Makes every cache that JAX opens from now on one of `WholeEntries`. JAX has no interface for
    that; if its internals have other names, its own cache stays."""
    if hasattr(compilation_cache, "get_file_cache"):
        compilation_cache.get_file_cache = _open


def _open(path: str) -> tuple[compilation_cache_interface.CacheInterface, str]:
    if is_url(path):
        return BucketEntries(path), path
    return WholeEntries(path, max_size=jax.config.jax_compilation_cache_max_size), path


_compile: Any = getattr(compiler, "_compile_and_write_cache", None)
_running = threading.local()
"""Attribute `first`: lowest process that runs the program which this thread compiles."""


def _compile_and_write(backend: Any, computation: Any, devices: Any, *rest: Any) -> Any:
    _running.first = min(device.process_index for device in devices)
    return _compile(backend, computation, devices, *rest)


def _write(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any
) -> None:
    """Keeps an entry in every process that has compiled it, or, in a bucket, in the first of them.

    JAX's own function writes in process 0 alone, which compiles none of the other role's programs.
    """
    first = getattr(_running, "first", jax.process_index()) == jax.process_index()
    if is_url(jax.config.jax_compilation_cache_dir) and not first:
        return
    if compile_time_secs >= jax.config.jax_persistent_cache_min_compile_time_secs:
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )
        except Exception as error:  # a full disk, or a program that JAX cannot serialise
            logger.warning("compilation cache: %s is not kept: %s", module_name, error)


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, private to the user, unless JAX was already told where.

    Includes programs that compile fast, unless JAX's variables say otherwise: a deployment has
    dozens. The folder may be shared by hosts, or be a bucket.
    """
    keep_entries_whole()
    if _compile is not None:
        private: Any = compiler
        private._compile_and_write_cache, private._cache_write = _compile_and_write, _write
    for limit, least in (("min_compile_time_secs", 0.0), ("min_entry_size_bytes", -1)):
        if (name := f"jax_persistent_cache_{limit}").upper() not in os.environ:
            jax.config.update(name, least)
    given = jax.config.jax_compilation_cache_dir
    if given and is_url(given):
        # XLA's own caches of GPUs are files.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        return
    folder = Path(given) if given else user_cache() / "jaxserve" / f"xla-{jax.__version__}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


Call = Callable[..., Any]
"""A compiled program's call, which takes flat, committed arguments."""


def hot_call(compiled: jax.stages.Compiled) -> Call:
    """Returns the C++ call of a program without its Python wrapper, which saves a microsecond of 15
    to 20. It is private to JAX; if it is not as expected, returns the program itself."""
    private: Any = compiled
    try:
        if private._call is None:
            private._call = private._executable.create_cpp_call(private._params)
        return private._call or compiled
    except (AttributeError, TypeError):
        return compiled

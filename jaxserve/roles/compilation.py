"""Compiles the programs of a worker, each once, and keeps them for later processes.

Processes of a host share a folder of compiled programs. Hosts may share a folder or a bucket
(`gs://`, `s3://`). A reader never sees part of an entry.
"""

import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import msgspec
from jax._src import compilation_cache, compilation_cache_interface, compiler, lru_cache

from jaxserve.config.model import FFN, LayerKind
from jaxserve.errors import CheckpointError, EngineFailedError
from jaxserve.progress import Progress
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.program import Program
from jaxserve.storage.bucket import ByteSpan, StorageBucket, is_url
from jaxserve.storage.files import write_whole
from jaxserve.storage.mirror import user_cache

PROGRAM_SECONDS = 60.0
"""Longest wait at the end of a process for the program that it compiles."""

logger = logging.getLogger(__name__)


class ProgramKey(NamedTuple):
    """Names one program of a deployment."""

    name: str
    """Name of the function that makes it."""
    kind: LayerKind | FFN | str | None
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

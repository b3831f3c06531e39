"""Set-up of all tests: simulated CPU devices, a compile cache, strict dtypes.

No accelerator is touched: JAX is told so before anything imports it. Warnings are errors
(`filterwarnings` in pyproject.toml). `make nightly` also checks the functions of both packages
against their annotations (`--jaxtyping-packages`, `typechecker.py`).
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis

from tests import garbage, typechecker  # noqa: F401  (jaxtyping's hook finds `typechecker`)

SIMULATED_DEVICES = 8
REPOSITORY = Path(__file__).resolve().parent.parent

# All workers, and the processes that tests start, share a compile cache: its entries are whole
# (`pytest_sessionstart`).
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(REPOSITORY / "build" / "jax_cache")
# Tests start processes from one in which gRPC runs; its handlers would revive it in the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Of small programs, too: to read one costs a third of a compilation, and to write it nothing.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402  (after the platform is chosen)
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

LONGEST = (REPOSITORY / "tests" / "longest.txt").read_text().split()
"""Test files that take longest, in this order; the Makefile keeps it (`--no-loadscope-reorder`),
so that no worker starts one of them when the others have finished."""

LONG = REPOSITORY / "tests" / "nightly.txt"
"""Tests that are `nightly` for their time alone, beside those that say so themselves; none of them
is the one that kills a mutant (`mutants.jsonl`)."""

UNOPTIMISED = (
    "jaxserve/link/dispatch",
    "jaxserve/model",
    "pallas_kernels/attention",
    "pallas_kernels/grouped_matmul",
    "pallas_kernels/norm_quantize",
    "pallas_kernels/quantize",
    "pallas_kernels/rotate_and_write",
    "pallas_kernels/sparse_attention",
)
"""Folders whose tests are `unoptimised`, but for those that compile for a TPU or a GPU."""

_UNOPTIMISED = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_may_be_unoptimised = os.environ.get(_UNOPTIMISED) != "0"

_exempted = pytest.StashKey[Path]()
"""The file before whose first test all was exempted from garbage collection."""
garbage.take_over()


def pytest_sessionstart() -> None:
    """Not earlier: the import hook is there now."""
    from jaxserve import ports
    from jaxserve.roles.compilation import keep_entries_whole

    # The system gives ports above 32767 to any connection of any process: a port that a test found
    # free there may be taken when it listens. These belong to this worker alone.
    first = 10000 + 2000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    ports.use(f"{first}-{first + 1999}")
    keep_entries_whole()
    _share_entries_among_devices()


def _share_entries_among_devices() -> None:
    """Programs compiled for one simulated device are read for another one: a domain's programs are
    the next one's. JAX leaves the devices out of an entry's key on GPUs alone, but loads every
    program for those that it is to run on."""
    from jax._src import cache_key

    hashed = getattr(cache_key, "_hash_serialized_compile_options", None)
    if hashed is not None:

        def without_devices(
            digest: Any, options: Any, strip_device_assignment: bool = True
        ) -> None:
            hashed(digest, options, strip_device_assignment=True)

        cache_key._hash_serialized_compile_options = without_devices


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every other worker imports the files from the last to the first: what one has rewritten and
    compiled by then, the other one reads."""
    report = yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if isinstance(collector, pytest.Directory) and int(worker.removeprefix("gw")) % 2:
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first, in the same order for all workers, and marks what is nightly
    for its time and what is compiled without optimisations."""
    places = {REPOSITORY / "tests" / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), "LONGEST names a file that is not there"
    items.sort(key=lambda item: (places.get(item.path, len(LONGEST)), item.path))
    folders = [REPOSITORY / "tests" / name for name in UNOPTIMISED]
    assert all(folder.is_dir() for folder in folders), (
        "UNOPTIMISED names a folder that is not there"
    )
    named = {item.nodeid.removeprefix("tests/"): item for item in items}
    paths = {item.path for item in items}  # far fewer than items
    some_of_a_file = any("::" in argument for argument in config.args)
    for name in LONG.read_text().splitlines():
        if found := named.get(name):
            found.add_marker("nightly")
        elif REPOSITORY / "tests" / name.partition("::")[0] in paths and not some_of_a_file:
            raise pytest.UsageError(f"{LONG.name} names {name}, which is not there")
    within = {path for path in paths if any(map(path.is_relative_to, folders))}
    for item in items:
        if item.path in within:
            item.add_marker("unoptimised")


def compile_unoptimised(wanted: bool) -> bool:
    """Decides how programs are compiled from now on, also in processes that tests start.

    Returns:
      how it was until now.
    """
    before = bool(jax.config.read("jax_disable_most_optimizations"))
    unoptimised = _may_be_unoptimised and wanted
    os.environ[_UNOPTIMISED] = str(int(unoptimised))
    jax.config.update("jax_disable_most_optimizations", unoptimised)
    return before


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Decides how the test's programs are compiled, also in processes that it starts, and exempts
    from garbage collection what is there before a file's first test."""
    real = any(map(item.get_closest_marker, ("gpu", "gpu_aot", "tpu_aot")))
    compile_unoptimised(not real and item.get_closest_marker("unoptimised") is not None)
    if item.path != item.config.stash.get(_exempted, None):
        garbage.exempt()
        item.config.stash[_exempted] = item.path

"""Compiles the Hopper kernels for an H200, without one, and reports registers, spills and shared
memory.

`python -m pallas_kernels.gpu_resources [--op OP] [--case NAME] [--json]` compiles what an op's
`cases.py` names, on any machine that has JAX's CUDA wheels (`pip install "jax[cuda13]"`).
Nothing is timed: it shows that the kernels compile, and that none spills registers.
Called by the tests, too. Knows nothing of the ops.
"""

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies

from pallas_kernels.aot import Case, compile_on

OPS = (
    *("attention", "gated_delta", "grouped_matmul"),
    *("norm_quantize", "rotate_and_write", "sparse_attention"),
)
"""Ops whose `cases.py` has `gpu_cases`."""
DESCRIPTIONS: dict[str, tuple[bytes, tuple[tuple[str, str], ...]]] = {
    "h200": (b"NVIDIA H200 141GB HBM3e", ()),
    "a100": (b"NVIDIA A100-SXM4-80GB", ()),
    # The plugin knows no GPU of compute capability 8.9.
    "l40": (b"NVIDIA RTX A6000", (("minor: 6", "minor: 9"), ("NVIDIA RTX A6000", "NVIDIA L40"))),
}
"""Names of devices in the descriptions that XLA's CUDA plugin contains, and text to replace in each
description."""
REFUSE_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
"""Option with which XLA raises if registers spill."""


class Resources(NamedTuple):
    """Resources of one kernel of a case."""

    case: str
    kernel: str
    registers: int
    """Registers of a thread, 255 at most."""
    spilled_bytes: int
    """Bytes that a thread spills to local memory."""
    shared_memory: int
    """Bytes of shared memory of a thread block, 232448 at most."""
    losses: list[str]
    """Performance warnings of ptxas, such as serialised tensor core instructions."""


def plugin() -> Path | None:
    """Returns the path of XLA's CUDA plugin; None if it is not installed."""
    for package in ("xla_cuda13", "xla_cuda12"):
        try:
            found = importlib.util.find_spec(f"jax_plugins.{package}")
        except ModuleNotFoundError:
            return None
        if found is not None and found.origin is not None:
            return Path(found.origin).parent / "xla_cuda_plugin.so"
    return None


def cases(op: str, function: Literal["gpu_cases", "before_hopper"] = "gpu_cases") -> list[Case]:
    """Returns the cases that an op lists, for Hopper or for older GPUs."""
    module = importlib.import_module(f"pallas_kernels.{op}.cases")
    return getattr(module, function)()


def prepare(folder: str | None = None) -> None:
    """Prepares this process to compile for GPUs without one; with a folder, every kernel that it
    compiles leaves its report there.

    Must be called before JAX looks for devices.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if folder is None:
        return
    os.environ |= {
        "MOSAIC_GPU_DUMP_TO": folder,
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
    }


def devices(hosts: int = 1, of_host: int = 1, name: str = "h200") -> tuple[jax.Device, ...]:
    """Returns GPUs that exist only as a description (`DESCRIPTIONS`).

    Raises:
      RuntimeError: there is no CUDA plugin, or it does not know the device.
    """
    library = plugin()
    if library is None:
        raise RuntimeError('there is no CUDA plugin: pip install "jax[cuda13]"')
    shape = f"1x{hosts}x{of_host}"
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name=shape,
        topology=shape,
        target_config=_description(library, name),
    )
    return tuple(found.devices)


def compile_case(
    case: Case, name: str = "h200", options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles for one GPU, in a process that `prepare` has set up.

    Raises:
      RuntimeError: as `devices`; or with `REFUSE_SPILLS`, registers spill.
    """
    return compile_on(devices(name=name)[0], case, options)


def resources(case: Case, folder: str) -> list[Resources]:
    """Compiles a case for one H200, in a process that `prepare` has set up with this folder.

    Raises:
      RuntimeError: as `compile_case`, or the case has no kernel.
    """
    before = set(Path(folder).iterdir())
    compile_case(case)
    reports = sorted(set(Path(folder).iterdir()) - before)
    found = list(_read(case.name, reports))
    if not found:
        raise RuntimeError(f"{case.name}: no kernel was compiled")
    return found


def _description(library: Path, name: str) -> str:
    """Returns the text in the library that describes the device."""
    device, changes = DESCRIPTIONS[name]
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(device)
        if place < 0:
            raise RuntimeError(f"{library} does not know {device.decode()}")
        text = data[data.rfind(b"\0", 0, place) + 1 : data.find(b"\0", place)].decode()
    for old, new in changes:
        text = text.replace(old, new)
    return text


def _read(case: str, reports: list[Path]) -> Iterator[Resources]:
    """Yields the numbers that ptxas and Mosaic report for every kernel.

    Code that this process has compiled before is not compiled again, and has no ptxas report.
    """
    assembler, memory = _by_kernel(reports, ".ptxas"), _by_kernel(reports, ".resources.txt")
    for kernel, texts in assembler.items():
        for text, shared in zip(texts, memory[kernel], strict=True):
            yield Resources(
                case,
                kernel,
                _number(r"Used (\d+) registers", text),
                _number(r"(\d+) bytes spill stores", text),
                _number(r"smem_scratch_bytes=(\d+)", shared),
                re.findall(r"Potential Performance Loss: (.*)", text),
            )


def _by_kernel(reports: list[Path], suffix: str) -> dict[str, list[str]]:
    """Returns the texts of the files `KERNEL_NUMBER.suffix`, by kernel and in order of numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in reports:
        if path.name.endswith(suffix):
            kernel, _, number = path.name.removesuffix(suffix).rpartition("_")
            found.setdefault(kernel, []).append((int(number), path.read_text()))
    return {kernel: [text for _, text in sorted(texts)] for kernel, texts in found.items()}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in: {text}")
    return int(found.group(1))


def _compile_before_hopper(name: str) -> None:
    """Compiles the batches of attention for a GPU before Hopper, and prints the name of each.

    Raises:
      RuntimeError: registers spill, or no kernel was compiled.
    """
    prepare()
    warnings.simplefilter("ignore", DeprecationWarning)  # Pallas' Triton backend is deprecated.
    for case in cases("attention", "before_hopper"):
        compiled = compile_case(case, name, REFUSE_SPILLS)
        if "paged_attention" not in str(compiled.as_text()):
            raise RuntimeError(f"{case.name}: no kernel was compiled")
        print(case.name, flush=True)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.gpu_resources")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--json", action="store_true", help="a line for every kernel")
    parser.add_argument(
        "--before-hopper",
        choices=[name for name in DESCRIPTIONS if name != "h200"],
        help="compile attention by Triton for this GPU, and fail where registers spill",
    )
    arguments = parser.parse_args()
    if plugin() is None:
        sys.exit('there is no CUDA plugin: pip install "jax[cuda13]"')
    if arguments.before_hopper:
        _compile_before_hopper(arguments.before_hopper)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        if not arguments.json:
            print(f"{'case':36} {'kernel':26} {'registers':>9} {'spilled':>7} {'shared':>7}")
        for op in arguments.op or OPS:
            for case in cases(op):
                if arguments.case and case.name not in arguments.case:
                    continue
                for found in resources(case, folder):
                    if arguments.json:
                        print(json.dumps(found._asdict()), flush=True)
                        continue
                    numbers = f"{found.registers:9} {found.spilled_bytes:7} {found.shared_memory:7}"
                    print(f"{found.case:36} {found.kernel:26} {numbers}", *found.losses, flush=True)


if __name__ == "__main__":
    main()

"""Compiles kernels ahead of time for TPUs that this machine lacks, and reports the memory they use.

Called by `bundles.py` and by the tests. `python -m pallas_kernels.aot OP GENERATION [CASE ...]`
compiles the cases that an op's `cases.py` names, and prints a line of JSON for each. It needs
libtpu, which reads its settings when it is loaded: `environment()` has them, for a process of its
own. Knows nothing of the ops.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.hlo import estimated_cycles


class TpuGeneration(NamedTuple):
    """A TPU generation; rates of one core, which is what JAX calls a device."""

    topology: str
    device_kind: str
    hertz: float
    """Most bundles issued per second."""
    memory_bandwidth: float
    """HBM bytes per second."""
    branch_delay: int
    """Delay slots: bundles that are still issued after a branch."""


GENERATIONS = {
    "v5e": TpuGeneration("v5e:2x2", "TPU v5 lite", 1.5e9, 819e9, 4),
    "v6e": TpuGeneration("v6e:2x2", "TPU v6 lite", 1.75e9, 1640e9, 4),
    "v7x": TpuGeneration("tpu7x:2x2x1", "TPU7x", 2.2e9, 3690e9, 1),
}
"""Bandwidths as published (v7x: half a chip's). Clocks are the published peak of BF16 products
divided by what the matrix units do in a cycle."""


class Case(NamedTuple):
    """One op at one size; `cases(generation)` in `<op>/cases.py` lists them."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct`."""
    donated: tuple[int, ...] = ()
    """Donated arguments."""
    loop: "Loop | None" = None
    """The loop to analyse; None: the case has no kernel."""


class Loop(NamedTuple):
    """Work and copies of one iteration of a kernel's inner loop."""

    kernel: str
    """Name of the Pallas call."""
    unit: str
    """Unit of work, for instance a KV token."""
    units: int
    """Units of work in a round."""
    copies: int
    """Number of copies that a round starts."""
    bytes_per_unit: float
    """Bytes read from HBM for a unit of work."""


def environment(flags: str = "") -> dict[str, str]:
    """Returns variables for a process that compiles for TPUs; several may run at a time."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags,
    }


def cases(op: str, generation: str) -> list[Case]:
    """The cases that an op lists for a generation."""
    module = importlib.import_module(f"pallas_kernels.{op}.cases")
    return module.cases(generation)


def compile_case(case: Case, generation: TpuGeneration) -> jax.stages.Compiled:
    """Compiles for one core; the process must have been started in `environment()`."""
    topology = topologies.get_topology_desc(generation.topology, platform="tpu")
    return compile_on(topology.devices[0], case)


def compile_on(
    device: Any, case: Case, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles for a device of a topology, with compiler options."""
    mesh = Mesh([device], ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), case.arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(case.function, donate_argnums=case.donated).lower(*arguments)
    return lowered.compile(compiler_options=options)


def compile_all(op: str, generation: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compiles every case, or the named ones. Yields name, seconds, temporary bytes, and the cycles
    that XLA estimates for code outside the kernel."""
    for case in cases(op, generation):
        if names and case.name not in names:
            continue
        start = time.perf_counter()
        compiled = compile_case(case, GENERATIONS[generation])
        memory = compiled.memory_analysis()
        yield {
            "case": case.name,
            "generation": generation,
            "seconds": round(time.perf_counter() - start, 1),
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
            "estimated_cycles": estimated_cycles(compiled.as_text() or ""),
        }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot")
    parser.add_argument("op")
    parser.add_argument("generation", choices=GENERATIONS)
    parser.add_argument("names", nargs="*", metavar="case")
    arguments = parser.parse_args()
    os.environ.update(environment(os.environ.get("LIBTPU_INIT_ARGS", "")))
    for result in compile_all(arguments.op, arguments.generation, arguments.names):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

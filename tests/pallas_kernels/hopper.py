"""Compiles for an H200 that is not there, and says what the compiled kernels need.

Used by tests marked `gpu_aot`. Needs `jax[cuda13]` and no GPU: the description of the H200 lies in
XLA's CUDA plugin. Nothing runs, so nothing is learned about speed.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The plugin does not ask for a driver then.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

SHARED_MEMORY = 232_448
"""Bytes that a CTA may have."""


class Resources(NamedTuple):
    """Of one kernel: registers a thread, bytes spilled, bytes of shared memory, warnings."""

    registers: int
    spilled: int
    shared_memory: int
    warnings: list[str]


def h200_mesh() -> Mesh:
    """A mesh of one H200."""
    plugins = pytest.importorskip("jax_plugins.xla_cuda13")
    [library] = Path(plugins.__file__).parent.glob("*plugin*.so")
    content = library.read_bytes()
    position = content.index(b"NVIDIA H200 141GB HBM3e")
    begin, end = content.rindex(b"\0", 0, position) + 1, content.index(b"\0", position)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="1x1x1",
        topology="1x1x1",
        target_config=content[begin:end].decode(),
    )
    return Mesh(np.asarray(topology.devices), ("device",))


def compile_kernels(mesh, folder, monkeypatch, function, *shapes) -> list[Resources]:
    """Compile `function` of arrays of these shapes, and return what each of its kernels needs."""
    settings = {"TO": str(folder), "PTX": "1", "PTXAS": "1", "RESOURCES": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).lower(*shapes).compile()
    return [_resources(path) for path in sorted(folder.glob("*.ptxas"))]


def _resources(path: Path) -> Resources:
    log = path.read_bytes().decode(errors="replace")
    resources = path.with_suffix(".resources.txt").read_text()
    return Resources(
        int(re.search(r"Used (\d+) registers", log)[1]),
        sum(int(size) for size in re.findall(r"(\d+) bytes spill", log)),
        int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]),
        re.findall(r"ptxas (?:warning|info *: \(C\d+\)).*", log),
    )

"""The form of a program: a function over device slices, and what it is compiled for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.mesh import cached_sharding
from jaxserve.roles.cuda_graphs import CudaGraphs, compiler_options
from jaxserve.roles.ragged_options import ragged_options

ROWS = PartitionSpec("dp")
PIECES = PartitionSpec(("dp", "tp"))
REPLICATED = PartitionSpec()

_ON_CPU = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}
"""YNNPACK for products, as XLA:CPU has it anyway, and for nothing else: it would reduce arrays of
4,096 elements and more, in another order than XLA does fewer, so that a token's norms and softmaxes
would depend on how many others are in its step. Vectors as wide as the CPU has them: half as many
instructions in products (`pallas_kernels/input_major.py`)."""


class Program(NamedTuple):
    """A function over device slices, ready to be compiled for its mesh."""

    name: str
    body: Callable[..., Any]
    mesh: Mesh
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...] | PartitionSpec
    donated: tuple[int, ...]
    cuda_graphs: CudaGraphs = "default"
    ragged: bool = False
    """Whether there are ragged all-to-alls in it."""

    def mapped(self) -> Callable[..., Any]:
        """The function over whole arrays."""
        mapped = jax.shard_map(
            self.body,
            mesh=self.mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            check_vma=False,
        )
        mapped.__name__ = self.name
        return mapped

    def compile(self) -> jax.stages.Compiled:
        """Compiles ahead of time for the shapes and shardings above."""
        arguments = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cached_sharding(self.mesh, spec))
            for a, spec in zip(self.arguments, self.in_specs, strict=True)
        ]
        lowered = jax.jit(self.mapped(), donate_argnums=self.donated).lower(*arguments)
        devices = list(self.mesh.devices.flat)
        platform = devices[0].platform
        if platform == "cpu":
            return lowered.compile(dict(_ON_CPU))
        options = compiler_options(self.cuda_graphs, platform) or {}
        if self.ragged:
            options |= ragged_options(len({one.process_index for one in devices}), platform)
        return lowered.compile(options or None)


def cut(leaves: Sequence[Array], sizes: Sequence[int]) -> list[tuple[Array, ...]]:
    """Splits flat leaves into runs of these lengths."""
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(leaves[start : start + size]))
        start += size
    return parts

"""The form of a program: a function over device slices, and what it is compiled for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.roles.cuda_graphs import CudaGraphs, compiler_options
from jaxserve.roles.ragged_options import ragged_options

Arrays = tuple[Array, ...]
"""Inputs of a program that belong together, as the leaves of a block do; or its results."""

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
    """Takes an argument for each of `inputs`, of the same form; returns flat arrays."""
    mesh: Mesh
    inputs: tuple[Any, ...]
    """Arrays, and trees of arrays that belong together: global shapes with their shardings."""
    out_specs: tuple[PartitionSpec, ...] | PartitionSpec
    donates: tuple[int, ...] = ()
    """Numbers of the inputs that the program may overwrite."""
    cuda_graphs: CudaGraphs = "default"
    ragged: bool = False
    """Whether the program has ragged all-to-alls."""

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The inputs' arrays, flat, as the compiled program takes them."""
        return tuple(jax.tree.leaves(self.inputs))

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the donated arguments."""
        inputs = [number for number, one in enumerate(self.inputs) for _ in jax.tree.leaves(one)]
        return tuple(place for place, number in enumerate(inputs) if number in self.donates)

    def mapped(self) -> Callable[..., Any]:
        """The function over whole arrays, flat."""
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
        devices = list(self.mesh.devices.flat)
        platform = devices[0].platform
        if platform == "cpu":
            return lowered.compile(dict(_ON_CPU))
        options = compiler_options(self.cuda_graphs, platform) or {}
        if self.ragged:
            options |= ragged_options(len({one.process_index for one in devices}), platform)
        return lowered.compile(options or None)

"""The form of a program: a function over device slices, and what it is compiled for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.roles.compiler_options import CudaGraphs, compiler_options

Arrays = tuple[Array, ...]
"""Inputs of a program that belong together, as the leaves of a block do; or its results."""

ROWS = PartitionSpec("dp")
PIECES = PartitionSpec(("dp", "tp"))
REPLICATED = PartitionSpec()


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
        between = self.ragged and len({device.process_index for device in devices}) > 1
        options = compiler_options(devices[0].platform, self.cuda_graphs, between)
        return lowered.compile(options or None)

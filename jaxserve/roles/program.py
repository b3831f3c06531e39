"""Describes a program: a function over device slices, and the options it is compiled with.

On GPUs, a flag set in XLA_FLAGS keeps that value in all programs.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

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

_PAIRED = {"xla_gpu_memory_limit_slop_factor": 1000}
"""For a program that exchanges messages with another one (`step_programs.py`): the memory, in
percent of the device's, above which XLA computes results twice to save space. It counts pages twice
that kernels write in place, and would then receive messages twice that are sent once (seen with
Step-3 for 16 + 16 H200: 61 messages more on one side)."""


def compiler_options(
    platform: str, graphs: CudaGraphs = "default", ragged: bool = False, paired: bool = False
) -> dict[str, Any]:
    """Returns the options that a program is compiled with.

    Args:
      ragged: whether the program has ragged all-to-alls between processes.
      paired: whether the program exchanges messages with another one.
    """
    if platform == "cpu":
        return dict(_ON_CPU)
    if platform not in ("cuda", "gpu"):
        return {}
    wanted = _GRAPHS.get(graphs, {}) | (_RAGGED if ragged else {}) | (_PAIRED if paired else {})
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
        devices = list(self.mesh.devices.flat)
        between = self.ragged and len({device.process_index for device in devices}) > 1
        options = compiler_options(devices[0].platform, self.cuda_graphs, between, self.paired > 0)
        return lowered.compile(options or None)

"""How XLA launches the programs of a decode step on GPUs: Step-3's, compiled for H200s that are not
there. The counts are bounds: fewer is better, and a test of more has found a regression.

In a process of its own, which prints the sequences that XLA dumps: JAX's settings stay.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest

from jaxserve.mesh import Submeshes
from jaxserve.model.templates import ModelTemplates
from jaxserve.planner import aot
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.pallas_kernels import gpu_aot

pytestmark = gpu_aot.COMPILED

LAUNCHES = {"CustomKernel", "CustomCall", "Copy", "Memset", "Gemm", "CublasLtMatmul"}
BLOCKS_THE_HOST = {"Conditional", "While"}  # outside of a graph


def kinds(sequence, depth=0):
    """Entries of a dumped sequence at a depth of nesting: [(number, kind)]."""
    found = re.findall(r"^( *)(\d+): k(\w+)", sequence, re.MULTILINE)
    return [(int(number), kind) for space, number, kind in found if len(space) == 4 * depth]


@functools.cache
def sequences():
    """The sequence of each program, as it runs: {name: text}."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=^$"
        names = gpu_aot.printed_by("tests.jaxserve.roles.test_cuda_graphs_aot", XLA_FLAGS=flags)
        texts = {name: _dumped(folder, name, SEQUENCE) for name in names}
        optimized = ["*gpu_after_optimizations"]
        return texts | {f"{name}.hlo": _dumped(folder, name, optimized) for name in names}


SEQUENCE = "thunk_sequence_after_thunk_passes", "thunk_sequence"
"""After XLA has made graphs of it, where it makes some."""


def _dumped(folder, name, endings):
    paths = [path for ending in endings for path in Path(folder).glob(f"*.jit_{name}.{ending}.txt")]
    return paths[0].read_text()


@pytest.mark.parametrize(("name", "most"), [("attend_moe", 17), ("ffn_moe", 21)])
def test_a_layers_programs_are_so_many_launches_and_nothing_waits_for_the_device(name, most):
    found = [kind for _, kind in kinds(sequences()[name])]
    assert not BLOCKS_THE_HOST & set(found), found
    assert "CommandBuffer" not in found  # no address stays: see `roles/compilation.py`
    assert len([kind for kind in found if kind in LAUNCHES]) <= most, found


@pytest.mark.parametrize(("name", "most"), [("leave", 20)])
def test_the_sampler_is_one_graph_with_its_branches(name, most):
    """Nodes that a greedy step runs, one condition included; its branches hold the rest."""
    sequence = sequences()[name]
    assert [kind for _, kind in kinds(sequence)] == ["CommandBuffer", "AllGather"]
    inside = [kind for _, kind in kinds(sequence, 1)]
    assert inside.count("Conditional") == 1
    assert not {"While", "CommandBuffer"} & set(inside)
    assert len(inside) <= most, inside


@pytest.mark.parametrize(("name", "least"), [("step_3", 6), ("ffn_step_3", 3)])
def test_messages_travel_beside_the_kernels_of_a_whole_step(name, least):
    """In the loops over dense and other layers, in each of the three turns of a layer."""
    assert "Conditional" not in [kind for _, kind in kinds(sequences()[name])]
    travels = r"%collective-permute-start\S* =.*?%collective-permute-done\S* ="
    spans = re.findall(travels, sequences()[f"{name}.hlo"], re.DOTALL)
    assert sum("/mpmd_map" in span for span in spans) >= least  # our kernels


def compile_programs():
    """Names of the nodes in their compiled order."""
    config, deployment = load("step3")
    meshes = Submeshes(deployment, aot.topology("h200:4x8"))
    attention = programs_of(LayerPrograms, deployment, config, meshes)
    ffn = programs_of(FFNPrograms, deployment, config, meshes)
    bucket = Bucket(128, 64)
    programs = (
        attention.attend(bucket, config.layer(4)),
        ffn.ffn(bucket, config.layer(4).ffn),
        attention.leave(bucket),
        *whole_steps(bucket),
    )
    for program in programs:
        program.compile()
        yield program.name


def whole_steps(bucket):
    sizes = {"ffn_ep": 16, "ffn_tp": 1, "ffn_instances": 1, "ffn_shared": "split"}
    config, deployment = load("step3", **sizes, link_route="trampoline")
    meshes = Submeshes(deployment, aot.topology("h200:4x8"))
    templates = ModelTemplates(config, deployment, meshes)
    return aot.whole_steps(templates, deployment, meshes, [bucket]).values()


if __name__ == "__main__":
    print(json.dumps(list(compile_programs())))

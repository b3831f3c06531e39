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
from jaxserve.planner import aot
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.pallas_kernels import gpu_aot

LAUNCHES = {"CustomKernel", "CustomCall", "Copy", "Memset", "Gemm", "CublasLtMatmul"}
BLOCKS_THE_HOST = {"Conditional", "While"}
"""Outside of a graph."""


def kinds(sequence, depth=0):
    """Entries of a dumped sequence at a depth of nesting: [(number, kind)]."""
    found = re.findall(r"^( *)(\d+): k(\w+)", sequence, re.MULTILINE)
    return [(int(number), kind) for space, number, kind in found if len(space) == 4 * depth]


def test_what_a_sequence_says():
    graph = """\
000: kCommandBuffer [source       | next=114 (1)]
    001: kCustomKernel [source  | next=002 (1)] fusion grid: [4, 1, 1] threads: [128, 1, 1]
    111: kConditional  [prev=016 (2)  | next=112 (1)]
      false_branch:
        018: kCustomKernel [source  | next=110 (3)] loop_fusion grid: [1, 1, 1]
      true_branch:
        No thunks.
114: kAllGather     [prev=000 (1) | sink        ] kAllGather
"""
    assert kinds(graph) == [(0, "CommandBuffer"), (114, "AllGather")]
    assert kinds(graph, 1) == [(1, "CustomKernel"), (111, "Conditional")]


@functools.cache
def sequences():
    """The sequence of each program, as it runs: {name: text}."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=^$"
        names = gpu_aot.printed_by("tests.jaxserve.roles.test_cuda_graphs_aot", XLA_FLAGS=flags)
        return {name: _sequence(Path(folder), name) for name in names}


def _sequence(folder, name):
    """After XLA has made graphs of it, where it makes some."""
    for ending in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        for path in folder.glob(f"*.jit_{name}.{ending}.txt"):
            return path.read_text()
    raise AssertionError(f"no sequence of {name}: {sorted(path.name for path in folder.iterdir())}")


def compiled(*case):
    return pytest.param(*case, marks=gpu_aot.COMPILED)


@pytest.mark.parametrize(("name", "most"), [compiled("attend_moe", 17), compiled("ffn_moe", 21)])
def test_a_layers_programs_are_so_many_launches_and_nothing_waits_for_the_device(name, most):
    found = [kind for _, kind in kinds(sequences()[name])]
    assert not BLOCKS_THE_HOST & set(found), found
    assert "CommandBuffer" not in found  # no address stays: see `roles/program.py`
    assert len([kind for kind in found if kind in LAUNCHES]) <= most, found


@pytest.mark.parametrize(("name", "most"), [compiled("leave", 20)])
def test_the_sampler_is_one_graph_with_its_branches(name, most):
    """What a greedy step runs, one condition included; the rest is in its branches."""
    sequence = sequences()[name]
    assert [kind for _, kind in kinds(sequence)] == ["CommandBuffer", "AllGather"]
    inside = [kind for _, kind in kinds(sequence, 1)]
    assert inside.count("Conditional") == 1
    assert not {"While", "CommandBuffer"} & set(inside)
    assert len(inside) <= most, inside


def compile_programs():
    """Their names, one after the other, as they are compiled."""
    config, deployment = load("step3")
    meshes = Submeshes(deployment, aot.topology("h200:4x8").devices)
    attention = programs_of(AttentionPrograms, deployment, config, meshes)
    ffn = programs_of(FFNPrograms, deployment, config, meshes)
    bucket = Bucket(128, 64)
    programs = (
        attention.attend(bucket, config.layer(4)),
        ffn.ffn(bucket.tokens, config.moe),
        attention.leave(bucket),
    )
    for program in programs:
        program.compile()
        yield program.name


if __name__ == "__main__":
    print(json.dumps(list(compile_programs())))

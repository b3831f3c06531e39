"""Programs that move experts between absent GPUs: lowered for them, and compiled with JAX's
CUDA wheels for hosts of eight, a process each."""

import json
import re

import jax
import pytest

from jaxserve.mesh import Submeshes
from jaxserve.planner import aot
from jaxserve.roles.ffn import FFNPrograms
from pallas_kernels.target import Target, use_target
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.pallas_kernels import gpu_aot

HOPPER = Target("mosaic_gpu", "NVIDIA H200")


def test_on_gpus_a_row_is_left_for_devices_that_send_nothing(tmp_path):
    """XLA's kernel waits for rows of every device on other hosts: each sends one."""
    deployment = layouts.deployment(tmp_path, {"ffn.ep": 3, "ffn.tp": 2})
    programs = programs_of(FFNPrograms, deployment)
    program = programs.experts.fetch(programs.banks[0])
    with use_target(HOPPER):
        traced = jax.jit(program.mapped()).trace(*program.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@ragged_all_to_all.* : \(tensor<(\w+)>, tensor<(\w+)>, .*\) ->", text)
    # Rows of three experts, and of one: d_model 64 and, of the halved d_ff, 17.
    assert found == [("192x17xf32", "65x17xf32")] + 2 * [("51x64xf32", "18x64xf32")]


def received() -> list[str]:
    """Shapes in which the leaves of an expert arrive, and their memory."""
    config, deployment = load("step3-alltoall")
    meshes = Submeshes(deployment, aot.topology("h200:4x8"))
    programs = programs_of(FFNPrograms, deployment, config, meshes)
    text = programs.experts.fetch(programs.banks[0]).compile().as_text() or ""
    return re.findall(r"ragged-all-to-all-done\S* = (\S+)", text)


@pytest.mark.gpu_aot
@gpu_aot.NEEDS_CUDA
@pytest.mark.timeout(gpu_aot.SECONDS)
def test_between_processes_it_goes_as_rows_go():
    """XLA's kernel on the device moves them, into memory that all devices see (`S(7)`), of Step-3's
    experts in pieces of 4 MB at most: 256 and 183 rows, and the one."""
    found = gpu_aot.printed_by("tests.jaxserve.roles.test_expert_programs")
    down = ["f32[257,1]{1,0:S(7)}", "u8[257,5120]{1,0:S(7)}"]
    gate = ["f32[184,1]{1,0:S(7)}", "u8[184,7168]{1,0:S(7)}"]
    assert sorted(found) == sorted([*down, *gate, *gate])


if __name__ == "__main__":
    print(json.dumps(received()))

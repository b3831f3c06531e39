"""What XLA schedules beside the collectives of an FFN layer on GPUs: `ffn_moe` of Step-3, compiled
for H200s that are not there.

In a process of its own, which prints what it found: JAX's settings stay.
"""

import json
import sys

import pytest

from jaxserve.mesh import Submeshes
from jaxserve.planner import aot
from jaxserve.planner.scheduled import windows
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from pallas_kernels.small_ops import instructions
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.pallas_kernels import gpu_aot

pytestmark = gpu_aot.COMPILED

LAYOUTS = {
    "step3": ["all-gather over ep tp", "all-to-all over tp"],
    "step3-alltoall": [
        "all-gather over ep tp",
        "ragged-all-to-all over 8 neighbours",
        "ragged-all-to-all over 8 neighbours",
    ],
}


def beside(layout: str) -> list[tuple[str, int]]:
    """Collectives and the number of kernels beside each."""
    config, deployment = load(layout)
    meshes = Submeshes(deployment, aot.topology("h200:4x8").devices)
    program = programs_of(FFNPrograms, deployment, config, meshes).ffn(Bucket(128, 1), config.moe)
    schedule = instructions(program.compile().as_text() or "")
    return [(one.collective, one.instructions) for one in windows(schedule, meshes.ffn.size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_of_the_shared_expert_is_beside_each_collective(layout):
    found = gpu_aot.printed_by("tests.jaxserve.model.ffn.test_beside_aot", layout)
    assert [name for name, _ in found] == LAYOUTS[layout]
    assert all(kernels >= 1 for _, kernels in found)


if __name__ == "__main__":
    print(json.dumps(beside(sys.argv[1])))

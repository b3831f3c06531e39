"""Work that XLA schedules beside the collectives of an FFN layer on GPUs: `ffn_moe` of Step-3,
compiled for H200s that are not there.

In a process of its own, which prints what it found: JAX's settings stay.
"""

import json
import sys

import pytest

from jaxserve.mesh import Submeshes
from jaxserve.planner import aot
from jaxserve.planner.scheduled import exchanged_bytes
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
    meshes = Submeshes(deployment, aot.topology("h200:4x8"))
    program = programs_of(FFNPrograms, deployment, config, meshes).ffn(Bucket(128, 1), config.moe)
    open_: dict[str, tuple[str, int]] = {}
    ended = []
    for one in instructions(program.compile().as_text() or ""):
        exchanged = exchanged_bytes(one.line, meshes.ffn.size)
        if one.op.endswith("-done"):
            ended += [open_.pop(operand) for operand in one.operands if operand in open_]
        elif exchanged and one.op.endswith("-start"):
            open_[one.name] = next(iter(exchanged)), 0
        elif open_ and not exchanged:  # counts for the collective that moves first
            first, (name, kernels) = next(iter(open_.items()))
            open_[first] = name, kernels + 1
    return [(name, kernels) for name, kernels in ended if kernels]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_of_the_shared_expert_is_beside_each_collective(layout):
    found = gpu_aot.printed_by("tests.jaxserve.model.ffn.test_beside_aot", layout)
    assert [name for name, _ in found] == LAYOUTS[layout]
    assert all(kernels >= 1 for _, kernels in found)


if __name__ == "__main__":
    print(json.dumps(beside(sys.argv[1])))

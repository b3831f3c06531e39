"""Bytes that a layer of Qwen3-Next moves in a decode step, by AOT-compiled programs."""

import json
import re
import sys

import pytest

from jaxserve.config.shipped import CONFIGS
from jaxserve.mesh import Submeshes
from jaxserve.planner.aot import topology
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.layout import Bucket
from pallas_kernels import aot, small_ops
from tests.jaxserve.roles.building import programs_of
from tests.jaxserve.roles.test_capacity import load
from tests.pallas_kernels.gpu_aot import COMPILED, lines_of

TPU, SEQUENCES, LANES = [pytest.mark.tpu_aot], 40, 2
POOL = 3 * SEQUENCES * LANES
DEVICES = {"v6e:2x4": TPU, "v7x:2x2x2": TPU, "h200:1x8": COMPILED}


@pytest.mark.parametrize("device", [pytest.param(d, marks=DEVICES[d]) for d in DEVICES])
def test_a_layer_reads_and_writes_each_state_once(device):
    """XLA copies no pool, and moves less than 30 % of the states' bytes beside the kernel."""
    command = "tests.jaxserve.model.attention.test_gated_delta", device
    found = json.loads(lines_of(*command, env=aot.environment())[-1])
    assert set(found["pool"]) == {"custom-call", "while"}
    assert found["beside"] < 0.3 * (2 * SEQUENCES * 32 * 128 * 128 * 4)


def rule_of_a_layer(device):
    """Compiles a decode step. Returns the instructions that take or give the pool of states, and
    the bytes of the recurrence without the pool."""
    hardware, model = device.partition(":")[0], str(CONFIGS / "models" / "qwen3-next-80b-a3b")
    sizes = {f"{role}_hardware": hardware for role in ("attention", "ffn")}
    sizes["scheduler_slots"], sizes["scheduler_token_buckets"] = SEQUENCES, [SEQUENCES, 512]
    config, deployment = load("qwen3-30b-a3b", model=model, **sizes)
    meshes = Submeshes(deployment, topology(device))
    programs = programs_of(LayerPrograms, deployment, config, meshes)
    (kind,) = (kind for kind in config.kinds() if hasattr(kind.attention, "convolution"))
    text = programs.attend(Bucket(SEQUENCES, 64), kind).compile().as_text()
    ones = list(small_ops.instructions(text, [POOL]))
    states = re.compile(rf"f32\[{POOL},[\d,]*(32768|128,128)\]")
    beside = sum(one.moved.bytes for one in ones if "/delta_rule/" in one.line)
    return {"pool": [one.op for one in ones if states.search(one.line)], "beside": beside}


if __name__ == "__main__":
    print(json.dumps(rule_of_a_layer(sys.argv[1])))

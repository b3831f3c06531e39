"""How XLA lays a message out on TPUs, by programs compiled for those that are not there.

In a process of its own, which prints what it found: libtpu looks at the environment once.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.link.dispatch.message import MessageFormat
from pallas_kernels import aot
from tests.pallas_kernels import gpu_aot

pytestmark = pytest.mark.tpu_aot

ROWS, D_MODEL, TOP_K, D_FF = 2048, 7168, 3, 320


@pytest.mark.parametrize("generation", [pytest.param("v6e", marks=pytest.mark.nightly), "v7x"])
def test_no_message_is_transposed(generation):
    """Neither a whole one nor gathered pieces, nor the rows in BF16 that are made of them.

    For v7x this fails for rows of 7196 words, of a whole message and of pieces, and for pieces
    without the layout that `unpack` asks for.
    """
    pytest.importorskip("libtpu")
    command = "tests.jaxserve.link.dispatch.test_message_aot", generation
    printed = gpu_aot.lines_of(*command, env=aot.environment(), limit=300)
    assert json.loads("".join(printed)) == {"whole": [], "pieces": []}


def transposed(mesh: Mesh, pieces: bool) -> list[str]:
    """Instructions over all values of a message whose result is transposed, or a copy."""
    message = MessageFormat(D_MODEL, TOP_K, "int8")

    def ffn(packed, order, weight):
        if pieces:
            packed = jax.lax.all_gather(packed, "ffn", axis=0, tiled=True)
        tokens, _, gates, *_ = message.unpack(packed, jnp.dtype(jnp.bfloat16))
        share = tokens[order // TOP_K].astype(jnp.float32) * gates.reshape(-1)[order][:, None]
        return share, tokens @ weight

    whole = PartitionSpec()
    specs = (PartitionSpec("ffn") if pieces else whole, whole, whole)
    shapes = (
        ((ROWS, message.width), message.word),
        ((ROWS * TOP_K,), "int32"),
        ((D_MODEL, D_FF), "bfloat16"),
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(ffn, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    program = jax.jit(mapped).lower(*arguments).compile().as_text()
    entry = program[program.index("\nENTRY ") :]
    array = rf"(?:u8|s8|bf16)\[\d+,(?:{D_MODEL}|{message.width})\]"
    return re.findall(rf"%\S+ = {array}(?:{{0,1\S*|\S* copy\()", entry)


if __name__ == "__main__":
    generation = aot.GENERATIONS[sys.argv[1]]
    devices = topologies.get_topology_desc(generation.topology, platform="tpu").devices
    mesh = Mesh(devices, ("ffn",))
    print(json.dumps({"whole": transposed(mesh, False), "pieces": transposed(mesh, True)}))

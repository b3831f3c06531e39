"""Exchanges on TPUs: the collectives of one layer, compiled for a slice that is not
there.

In a process of its own, which prints what it found: libtpu looks at the environment once. With
`python -m tests.jaxserve.model.ffn.test_exchange_aot tpu7x:2x2x2 16 deepseek` it prints those of a
layer of DeepSeek-V3's size over 16 devices.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import FFN, LayerKind, ModelConfig, Rope
from jaxserve.config.model import RouterSpec as Rule
from jaxserve.link.dispatch.message import MessageFormat, PackedRows
from jaxserve.mesh import FFN_AXES, FFN_RULES, shards
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.block import FFNBlock
from jaxserve.model.ffn.exchange import ended, make_exchanges
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.ffn.traffic import ExchangeKind
from jaxserve.model.module import Formats, Template
from pallas_kernels import aot
from tests.pallas_kernels import gpu_aot

pytestmark = pytest.mark.tpu_aot

ROWS = {"small": 32, "deepseek": 128}
"""Rows of a device."""

COLLECTIVE = re.compile(
    r"= (\w+)\[([\d,]+)\]\S* "
    r"(ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-done)?\("
)


def config(size: str) -> ModelConfig:
    """A model whose second layer is a mixture of experts."""
    d_model, d_ff, experts, top_k = {"small": (1024, 256, 16, 4), "deepseek": (7168, 2048, 256, 8)}[
        size
    ]
    sizes = {"q_heads": 8, "q_latent": 64, "kv_latent": 64, "nope_dim": 32, "rope_dim": 32}
    attention = MLA(**sizes, v_dim=32, scale=1.0, rope=Rope(theta=1e4))
    moe = FFN(router=Rule(experts=experts, top_k=top_k), expert_d_ff=d_ff, d_ff=d_ff)
    return ModelConfig(
        vocab=1024,
        d_model=d_model,
        decoder=(LayerKind(attention, FFN(d_ff=d_ff)), LayerKind(attention, moe)),
        norm_epsilon=1e-6,
        max_positions=4096,
    )


def collectives(mesh: Mesh, size: str, kind: ExchangeKind) -> list[list]:
    """Operation, dtype and shape on a device, of one MoE layer with weights in INT8."""
    model = config(size)
    dtype = jnp.dtype(jnp.bfloat16)
    formats = Formats(dtype, "int8", shards(mesh, FFN_RULES))
    ranks = mesh.shape["ep"], mesh.shape["tp"]
    template = Template(functools.partial(FFNBlock, model, model.moe, ranks, kind, formats))
    message = MessageFormat(model.d_model, model.top_k, "int8")
    exchange = make_exchanges(kind, Axes(*FFN_AXES, rows=FFN_AXES), dtype)["moe"]

    sizes = SlotSizes(model.experts, ranks[0])
    table = jax.ShapeDtypeStruct((model.experts, 1 + sizes.width), jnp.int32)

    def ffn(packed, table, *leaves):
        packing = PackedRows(message, dtype)
        stages = exchange.stages(packed, template.merge(leaves), packing, table)
        return ended(stages)[0].total().astype(dtype)

    pieces = PartitionSpec(FFN_AXES)
    specs = (pieces, PartitionSpec(), *template.specs(FFN_RULES))
    packed = jax.ShapeDtypeStruct((ROWS[size] * mesh.size, message.width), message.word)
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip((packed, table, *template.leaves), specs, strict=True)
    ]
    mapped = jax.shard_map(ffn, mesh=mesh, in_specs=specs, out_specs=pieces, check_vma=False)
    program = jax.jit(mapped).lower(*arguments).compile().as_text()
    return sorted(
        [name, dtype, [int(size) for size in shape.split(",")]]
        for dtype, shape, name in COLLECTIVE.findall(program)
    )


def main() -> None:
    topology, devices, size = sys.argv[1:]
    there = topologies.get_topology_desc(topology, platform="tpu").devices[: int(devices)]
    mesh = Mesh(np.array(there).reshape(-1, 1), FFN_AXES)
    kinds: tuple[ExchangeKind, ...] = ("gather", "alltoall")
    print(json.dumps({kind: collectives(mesh, size, kind) for kind in kinds}))


def test_rows_of_an_all_to_all_go_where_they_are_needed():
    """Nothing else moves but the numbers of rows."""
    pytest.importorskip("libtpu")
    command = "tests.jaxserve.model.ffn.test_exchange_aot", "v6e:2x2", "4", "small"
    environment = aot.environment() | {"JAX_OPTIMIZATION_LEVEL": "O0"}
    found = json.loads("".join(gpu_aot.lines_of(*command, env=environment, limit=400)))
    width = 1024 + 128
    assert found["gather"] == [
        ["all-gather", "u8", [4 * 32, width]],
        ["reduce-scatter", "bf16", [32, 1024]],
    ]
    sizes, back, there = found["alltoall"]
    assert sizes[:2] in (["all-reduce", "s32"], ["all-gather", "s32"])
    assert np.prod(sizes[2]) == 4 * 4
    # XLA may fill a row up to whole tiles.
    assert back[:2] == ["ragged-all-to-all", "bf16"]
    assert (back[2][0], np.prod(back[2][1:])) == (4 * 32, 1024)
    assert there[:2] == ["ragged-all-to-all", "u8"]
    assert there[2][0] == 4 * 32
    assert width <= np.prod(there[2][1:]) <= width + 512


if __name__ == "__main__":
    main()

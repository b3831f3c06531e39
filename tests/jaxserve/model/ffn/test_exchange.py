"""Both exchanges on simulated devices, against the mixture of experts in NumPy.

That whole models give the same tokens with either is in `test_exchange_layouts.py`.
"""

import dataclasses
import functools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoint.families import architecture
from jaxserve.checkpoint.random_leaves import random_leaves
from jaxserve.config.model import FFN
from jaxserve.link.dispatch.message import MessageFormat, PackedRows
from jaxserve.mesh import COLOCATED_FFN_RULES, FFN_RULES, shards
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.balance import rebalance
from jaxserve.model.ffn.block import FFNBlock, shared_parts
from jaxserve.model.ffn.exchange import ended, make_exchanges
from jaxserve.model.ffn.experts import slot_sizes
from jaxserve.model.ffn.placement import EMPTY, SlotSizes, first_entries, home_slots, replica_table
from jaxserve.model.ffn.replicas import choose_shared_rank
from jaxserve.model.message import DispatchMessage
from jaxserve.model.module import Formats, Template
from tests import golden
from tests.jaxserve.model.ffn.test_placement import random_placement
from tests.reference.tiny_step3 import TinyStep3

pytestmark = pytest.mark.unoptimised

TOP_K, EXPERTS, D_MODEL, ROWS = 3, 13, 16, 4
SIZES = TinyStep3(
    hidden_size=D_MODEL, moe_intermediate_size=10, share_expert_dim=12, moe_num_experts=EXPERTS
)
CONFIG = architecture(SIZES.config())
WIDER = architecture(dataclasses.replace(SIZES, share_expert_dim=20).config())
"""A model whose shared expert takes two slots on ranks of its own."""
FORMAT = MessageFormat(D_MODEL, TOP_K, "float32")
FLOAT = jnp.dtype(jnp.float32)

MESHES = {
    "AFD 8 x 1": (8, 1, True),
    "AFD 4 x 2": (4, 2, True),
    "AFD 2 x 4": (2, 4, True),  # fewer ranks than experts a token
    "colocated 8 x 1": (8, 1, False),
    "colocated 4 x 2": (4, 2, False),
}
"""Ranks, tensor devices, and whether all devices have different rows."""


class Layer(NamedTuple):
    """One MoE layer on eight devices."""

    sizes: SlotSizes
    rows: int
    """Rows of all devices."""
    weights: dict[str, np.ndarray]
    """Weights of the experts at home."""
    run: object

    def __call__(self, x, experts, gates, placement=None):
        """All rows' results, and the tokens of every expert on each rank."""
        arrays = jnp.asarray(x), jnp.asarray(experts, jnp.int32), jnp.asarray(gates, jnp.float32)
        rows, load = self.run(*arrays, placement=placement or home_slots(self.sizes))
        return np.asarray(rows), np.asarray(load).reshape(self.sizes.all_ranks, EXPERTS)

    def expert(self, number):
        """An expert's matrices."""
        slot = home_slots(self.sizes).index(number)
        return [self.weights[f"experts.{name}"][slot] for name in ("gate", "up", "down")]

    def shared(self, x, experts):
        """The shared expert's output, in NumPy; with ranks of its own it leaves padding out."""
        names, first = ("gate", "up", "down"), self.sizes.total
        if not self.sizes.shared_ranks:
            return swiglu(x, *(self.weights[f"dense.{name}"] for name in names))
        parts = range(first, first + self.sizes.shared_parts)
        matrices = [[self.weights[f"experts.{name}"][slot] for name in names] for slot in parts]
        return sum(swiglu(x, *part) for part in matrices) * (experts[:, :1] < EXPERTS)

    def expected(self, x, experts, gates):
        """The same, in NumPy."""
        out = self.shared(x, experts)
        load = np.zeros(EXPERTS, int)
        for row, (chosen, weight) in enumerate(zip(experts, gates, strict=True)):
            for expert, gate in zip(chosen, weight, strict=True):
                if expert < EXPERTS:
                    out[row] += gate * swiglu(x[row : row + 1], *self.expert(expert))[0]
                    load[expert] += 1
        return out, load


def swiglu(x, gate, up, down):
    a = x @ gate.T
    return (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T


@functools.cache
def layer(
    kind: str,
    mesh_name: str,
    redundant: int = 0,
    shared: int = 0,
    combine: str = "float32",
    whole: bool = False,
) -> Layer:
    ranks, tensor, split = MESHES[mesh_name]
    names, rules = (("ep", "tp"), FFN_RULES) if split else (("dp", "tp"), COLOCATED_FFN_RULES)
    mesh = Mesh(np.array(jax.devices()[: ranks * tensor]).reshape(ranks, tensor), names)
    formats = Formats(FLOAT, "plain", shards(mesh, rules))
    config, more = WIDER if shared else CONFIG, {"redundant": redundant, "shared_ranks": shared}
    build = functools.partial(
        FFNBlock, config, config.moe, (ranks, tensor), kind, formats, **more, whole_shared=whole
    )
    sizes = slot_sizes(config.moe, ranks, **more)
    template = Template(build, {"expert_slots": first_entries(sizes)}, shared_parts(sizes))
    axes = Axes(*names, rows=names if split else names[:1])
    exchange = make_exchanges(kind, axes, FLOAT, combine=combine)["moe"]
    leaves = random_leaves(template, 1)

    def body(x, experts, gates, table, *leaves):
        packed = FORMAT.pack(DispatchMessage(x, experts, gates))
        packing = PackedRows(FORMAT, FLOAT)
        rows, load = ended(exchange.stages(packed, template.merge(leaves), packing, table))
        return rows.total(), load

    rows, specs = PartitionSpec(axes.rows), template.specs(rules)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(rows, rows, rows, PartitionSpec(), *specs),
        out_specs=(rows, PartitionSpec(names[0])),
        check_vma=False,
    )
    compiled = jax.jit(mapped)
    weights = dict(zip(template.names, map(np.asarray, leaves), strict=True))
    devices = ranks * tensor if split else ranks
    home = home_slots(sizes)

    def run(*arrays, placement):
        sharding = NamedSharding(mesh, rows)
        placed = []
        for leaf, known, spec in zip(leaves, template.leaves, specs, strict=True):
            value = np.asarray(leaf)
            if known.of_slots:
                held = [value[home.index(max(e, 0))] * (e != EMPTY) for e in placement]
                value = np.concatenate([held, value[sizes.total :]])
            placed.append(jax.device_put(value, NamedSharding(mesh, spec)))
        table = jnp.asarray(replica_table(placement, sizes))
        return compiled(*(jax.device_put(array, sharding) for array in arrays), table, *placed)

    return Layer(sizes, ROWS * devices, weights, run)


def inputs(layer, seed=0, allowed=range(EXPERTS)):
    """Rows of any values, of which each chooses among the allowed experts."""
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(allowed)[:TOP_K] for _ in range(layer.rows)]
    x = rng.normal(size=(layer.rows, D_MODEL)).astype(np.float32)
    return x, np.stack(chosen).astype(np.int32), rng.random((layer.rows, TOP_K), np.float32)


def check(layer, x, experts, gates, placement=None):
    out, load = layer(x, experts, gates, placement)
    expected, counted = layer.expected(x, experts, gates)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert load.sum(axis=0).tolist() == counted.tolist()
    return load


@golden.table("model/routed_exchanges.yaml", "nightly")
def test_any_routing(kind, mesh, whole):
    one = layer(kind, mesh, whole=whole)
    check(one, *inputs(one))


def test_results_in_int8():
    """Every rank's sum over its experts is rounded, by a scale of its own, before all are added;
    the shared expert's result, which does not travel here, is not."""
    one = layer("alltoall", "AFD 8 x 1", combine="int8")
    x, experts, gates = inputs(one)
    expected, local, home = one.shared(x, experts), one.sizes.local, home_slots(one.sizes)
    for rank in range(one.sizes.ranks):
        share = np.zeros_like(x)
        for row, choice in np.ndindex(experts.shape):
            if home.index(experts[row, choice]) // local == rank:
                one_row = swiglu(x[row : row + 1], *one.expert(experts[row, choice]))
                share[row] += gates[row, choice] * one_row[0]
        step = np.abs(share).max(axis=1, keepdims=True) / 127
        expected += np.rint(share / np.where(step > 0, step, 1)) * step
    out, _ = one(x, experts, gates)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert np.abs(out - one.expected(x, experts, gates)[0]).max() > 1e-3


@pytest.mark.parametrize("mesh", ["AFD 8 x 1", "AFD 4 x 2"])
def test_a_whole_shared_expert_is_not_rounded_to_int8(mesh):
    """The result of the shared expert does not travel; that of routed experts is rounded."""
    one = layer("gather", mesh, combine="int8", whole=True)
    x, experts, gates = inputs(one)
    out, _ = one(x, experts, 0 * gates)
    np.testing.assert_allclose(out, one.shared(x, experts), atol=2e-5)
    out, _ = one(x, experts, gates)
    expected, _ = one.expected(x, experts, gates)
    assert 1e-3 < np.abs(out - expected).max() < 0.3
    divided, _ = layer("gather", mesh, combine="int8")(x, experts, 0 * gates)
    assert np.abs(divided - one.shared(x, experts)).max() > 1e-3


@pytest.mark.parametrize("mesh", MESHES)
def test_only_padding(mesh):
    one = layer("alltoall", mesh)
    x, experts, gates = inputs(one)
    out, load = one(np.zeros_like(x), np.full_like(experts, EXPERTS), np.zeros_like(gates))
    assert not out.any()
    assert not load.any()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_row_that_is_not_finite_spoils_no_other(mesh):
    one = layer("alltoall", mesh)
    x, experts, gates = inputs(one)
    x[5] = np.nan
    out, _ = one(x, experts, gates)
    expected, _ = one.expected(np.nan_to_num(x), experts, gates)
    assert np.isnan(out[5]).all()
    np.testing.assert_allclose(np.delete(out, 5, 0), np.delete(expected, 5, 0), atol=2e-5)


@settings(max_examples=60)
@given(
    mesh=st.sampled_from(list(MESHES)),
    seed=st.integers(0, 2**32 - 1),
    allowed=st.sets(st.integers(0, EXPERTS - 1), min_size=TOP_K),
    padding=st.sets(st.integers(0, 8 * ROWS - 1)),
)
def test_skewed_routings_with_padding_anywhere(mesh, seed, allowed, padding):
    one = layer("alltoall", mesh)
    x, experts, gates = inputs(one, seed, sorted(allowed))
    rows = [row for row in padding if row < one.rows]
    experts[rows], gates[rows] = EXPERTS, 0.0
    check(one, x, experts, gates)


@golden.table("model/placed_exchanges.yaml")
def test_any_placement_gives_the_same(kind, mesh, redundant):
    """Replicas of an expert share its rows."""
    one, draw = layer(kind, mesh, redundant), random.Random(3)
    x, experts, gates = inputs(one)
    experts[::5], gates[::5] = EXPERTS, 0.0
    for _ in range(4):
        check(one, x, experts, gates, random_placement(draw, one.sizes))
    experts[:], gates[:] = EXPERTS, 0.0
    experts[:, 0], gates[:, 0] = 0, 1.0
    counts, sizes = [100] + [1] * (EXPERTS - 1), one.sizes
    placement = rebalance(counts, sizes.total, sizes.ranks, most=sizes.width, apart=True)
    load = check(one, x, experts, gates, placement)
    local = one.sizes.local
    there = [placement[rank * local : (rank + 1) * local].count(0) for rank in range(len(load))]
    assert (load[:, 0] > 0).tolist() == [count > 0 for count in there]
    each = one.rows / sum(there)
    np.testing.assert_allclose(load[:, 0], np.multiply(there, each), atol=max(1, each))


@golden.table("model/shared_ranks.yaml")
def test_shared_experts_on_ranks_of_their_own(kind, mesh, ranks):
    """Whatever the placement of the others, of which these ranks count no tokens."""
    one, draw = layer(kind, mesh, 1, ranks), random.Random(3)
    assert one.sizes.shared_parts == 2
    x, experts, gates = inputs(one)
    experts[::5], gates[::5] = EXPERTS, 0.0
    for placement in (None, random_placement(draw, one.sizes)):
        load = check(one, x, experts, gates, placement)
        assert not load[one.sizes.ranks :].any()
    experts[:], gates[:] = EXPERTS, 0.0
    out, load = one(x, experts, gates)
    assert not out.any()
    assert not load.any()


def test_ranks_of_the_shared_expert_take_turns():
    sizes = SlotSizes(4, 3, shared_ranks=2, shared_parts=1)
    experts = jnp.array([[0, 1], [3, 2], [4, 4], [2, 0], [4, 4], [1, 0]])
    assert choose_shared_rank(experts, sizes).tolist() == [3, 4, 5, 3, 5, 4]
    assert choose_shared_rank(experts, sizes, first=1).tolist() == [4, 3, 5, 4, 5, 3]


def dimensions_of(exchange, spec=CONFIG.moe, **options):
    formats = Formats(FLOAT, "plain", {})
    build = functools.partial(FFNBlock, CONFIG, spec, (4, 2), exchange, formats, **options)
    return [leaf.dimensions for leaf in Template(build).leaves]


def test_the_shared_expert_is_whole_on_every_rank():
    assert ("d_ff", "d_model") in dimensions_of("gather")
    assert ("shared_d_ff", "d_model") in dimensions_of("alltoall")
    assert FFN_RULES["shared_d_ff"] == COLOCATED_FFN_RULES["shared_d_ff"] == "tp"
    assert ("own_d_ff", "d_model") in dimensions_of("gather", whole_shared=True)
    assert "own_d_ff" not in FFN_RULES
    assert COLOCATED_FFN_RULES["own_d_ff"] == "tp"
    assert ("d_ff", "d_model") in dimensions_of("alltoall", FFN(d_ff=32))

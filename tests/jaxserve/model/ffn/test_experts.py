"""Routed experts of one device; `test_exchange.py` adds up the shares of several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.checkpoint.families import architecture
from jaxserve.model.ffn.experts import RoutedExperts
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.module import Formats
from pallas_kernels.grouped_matmul import grouped_swiglu, routed
from tests.reference.tiny_step3 import TinyStep3

D_MODEL, D_FF, EXPERTS = 16, 10, 7
SIZES = TinyStep3(hidden_size=D_MODEL, moe_intermediate_size=D_FF, moe_num_experts=EXPERTS)
CONFIG = architecture(SIZES.config())


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"gate": (D_FF, D_MODEL), "up": (D_FF, D_MODEL), "down": (D_MODEL, D_FF)}
    return {
        name: rng.normal(scale=0.4, size=(EXPERTS, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def device_share(values, ranks, rank, tensor_rank) -> RoutedExperts:
    """Arrays of one device: its experts and its part of their d_ff, zeros behind the last."""
    expert_ranks, tensor_ranks = ranks
    module = RoutedExperts(CONFIG, CONFIG.moe, ranks, Formats(jnp.dtype(jnp.float32)), nnx.Rngs(0))
    for name, value in values.items():
        parameter = getattr(module, name)
        padded = np.zeros(parameter[...].shape, np.float32)
        padded[tuple(slice(size) for size in value.shape)] = value
        padded = np.split(padded, expert_ranks)[rank]
        axis = 2 if name == "down" else 1
        parameter.set_value(jnp.asarray(np.split(padded, tensor_ranks, axis)[tensor_rank]))
    return module


def share_of(module, *arguments):
    """The sums of a device's results."""
    return routed.combine(*module.choices(*arguments))


def run(module, x, experts, gates, rank):
    structure, state = nnx.split(module)

    def call(state, *arguments):
        return share_of(nnx.merge(structure, state), *arguments)

    return jax.jit(call)(state, x, experts, gates, rank)


def routing(tokens, top_k, seed, sentinel, padding=0):
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)]).astype(np.int32)
    gates = rng.random((tokens, top_k), np.float32)
    x = rng.normal(size=(tokens, D_MODEL)).astype(np.float32)
    experts[tokens - padding :], gates[tokens - padding :] = sentinel, 0.0
    return x, experts, gates


def test_kernels_are_told_how_many_rows_an_expert_has(monkeypatch):
    """2 x 24 choices of 8 slots on two ranks are 6 each, whatever fits on a rank."""
    said = []

    def network(rows, *weights, source, average, **options):
        said.append(average)
        return jnp.zeros((source.size, D_MODEL))

    monkeypatch.setattr(routed, "grouped_swiglu", network)
    x, experts, gates = map(jnp.asarray, routing(24, 2, 0, EXPERTS))
    run(device_share(weights(), (2, 1), 0, 0), x, experts, gates, jnp.int32(0))
    assert said == [6]


def test_shapes_are_padded_to_the_mesh():
    module = RoutedExperts(CONFIG, CONFIG.moe, (2, 4), Formats(jnp.dtype(jnp.float32)), nnx.Rngs(0))
    assert module.gate[...].shape == module.up[...].shape == (8, 12, D_MODEL)
    assert module.down[...].shape == (8, D_MODEL, 12)


@pytest.mark.parametrize(("layer", "rank"), [(0, 1), (1, 0), (2, 1)])
def test_experts_of_several_layers_in_one_row(layer, rank):
    """Colocated mode hands over all layers' experts; `layer` picks its own, and only those."""
    ranks = (2, 1)
    x, experts, gates = routing(9, 3, 5, SlotSizes(EXPERTS, 2).total, padding=2)
    rows = tuple(jnp.asarray(array) for array in (x, experts, gates))
    layers = [device_share(weights(seed), ranks, rank, 0) for seed in range(3)]
    alone = share_of(layers[layer], *rows, jnp.int32(rank))
    together = layers[0]
    for name in ("gate", "up", "down"):
        stacked = jnp.concatenate([getattr(share, name)[...] for share in layers])
        getattr(together, name).set_value(stacked)
    found = share_of(together, *rows, jnp.int32(rank), jnp.int32(layer))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(alone))
    assert np.any(np.asarray(alone))


@pytest.mark.parametrize(("weights", "row_format"), [("fp8", "fp8"), ("int8", "float")])
def test_format_of_rows(weights, row_format):
    """Gives what `grouped_swiglu` gives for one expert's rows, and changes the result."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, D_MODEL)), jnp.float32)
    experts, gates = jnp.full((5, 1), 3), jnp.full((5, 1), 0.5)

    def layer(expert_rows):
        formats = Formats(jnp.dtype(jnp.float32), weights, expert_rows=expert_rows)
        return RoutedExperts(CONFIG, CONFIG.moe, (1, 1), formats, nnx.Rngs(0))

    module = layer(row_format)
    output = np.asarray(share_of(module, x, experts, gates, 0))
    matrices = [getattr(module, name)[...] for name in ("gate", "up", "down")]
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[3].set(5)
    expected = grouped_swiglu(x, *matrices, sizes, row_format=row_format)
    np.testing.assert_array_equal(output, 0.5 * np.asarray(expected))
    assert not np.array_equal(output, np.asarray(share_of(layer(None), x, experts, gates, 0)))

"""The shared expert in slots of ranks of its own, from both kinds of folders, in every format."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.stored_array import StoredArray, with_parts
from jaxserve.errors import CheckpointError
from pallas_kernels.quantize.api import dequantize_weight
from tests import golden
from tests.jaxserve.checkpoint.opened import Opened
from tests.jaxserve.checkpoint.test_fp8 import MODEL
from tests.reference.block_fp8 import block_quantise
from tests.reference.tiny_models import TinyModel

pytestmark = pytest.mark.unoptimised

SIZES = dataclasses.replace(
    MODEL.sizes,
    moe_intermediate_size=128,
    n_shared_experts=2,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
)
TWO = TinyModel("two", SIZES, fp8_blocks=True)
"""Two shared experts as one, of whose d_ff a slot has half: whole blocks of scales."""

EXPERTS, LAYER = 4, 1


@pytest.fixture(scope="module")
def floats():
    """The file's values, FP32."""
    return block_quantise(TWO.tensors(), dequantised=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    made = {"hf": TWO.write(root / "hf", shards=2)}

    def get(kind):
        if kind not in made:
            convert(made["hf"], root / kind, None if kind == "blocks" else kind)
            made[kind] = root / kind
        return made[kind]

    return get


def slots_of(folder, overrides, source=None):
    """The routed experts' matrices of a layer as FP32 [slots, ...], by name, and the template."""
    opened = Opened(folder, overrides, source=source)
    if opened.deployment.mode == "colocated":
        (weights,) = opened.weights()
        leaves = [leaf[LAYER] for leaf in weights.blocks[weights._banks[0][0]]]
    else:
        leaves = opened.ffn().blocks[LAYER]
    template = opened.templates.moe
    experts = template.merge(leaves).experts
    found = {}
    for name in ("gate", "up", "down"):
        matrix = getattr(experts, name)[...]
        plain = isinstance(matrix, jnp.ndarray)
        found[name] = np.asarray(matrix if plain else dequantize_weight(matrix, jnp.float32))
    return found, template


@golden.table("checkpoint/shared_parts.yaml", "matrix")
def test_slots_are_parts_of_the_matrices(kind, wanted, layout, exact, folders, floats):
    formats = {"attention.weights": wanted, "ffn.weights": wanted, "dtype": "float32"}
    found, template = slots_of(folders(kind), layout | formats)
    assert not any(name.startswith("dense") for name in template.names)
    prefix = f"model.layers.{LAYER}.mlp."
    for name in ("gate", "up", "down"):
        whole = floats[f"{prefix}shared_experts.{name}_proj.weight"]
        parts = np.split(whole, 2, axis=1 if name == "down" else 0)
        own = [floats[f"{prefix}experts.{e}.{name}_proj.weight"] for e in range(EXPERTS)]
        for slot, matrix in enumerate([*own, *parts]):
            limit = 0 if exact else np.abs(whole).max() / 100
            np.testing.assert_allclose(found[name][slot], matrix, atol=limit, rtol=0)


def test_random_weights_are_the_same_on_all_its_ranks(folders):
    layout = {"ffn.ep": 4, "ffn.shared": "ranks:2", "dtype": "float32"}
    found, _ = slots_of(folders("hf"), layout | {"ffn.weights": "float32"}, RandomLeaves(3))
    for matrix in found.values():
        np.testing.assert_array_equal(matrix[4:6], matrix[6:8])
        assert not np.array_equal(matrix[4], matrix[5])


def stored(shape):
    return StoredArray(Path("x"), SimpleNamespace(shape=shape))


def test_scales_of_blocks_that_two_parts_share_are_refused(tmp_path):
    sizes = dataclasses.replace(SIZES, moe_intermediate_size=144)
    folder = TinyModel("odd", sizes, fp8_blocks=True).write(tmp_path / "odd")
    layout = {"ffn.ep": 3, "ffn.shared": "ranks:1", "dtype": "float32"}
    with pytest.raises(CheckpointError, match=r"shared_experts.*column 144: inside a block of 128"):
        slots_of(folder, layout)
    with pytest.raises(CheckpointError, match="3 rows or scales along axis 0 are not 2 x 2"):
        with_parts(*map(stored, [(4, 2, 1), (3, 1)]), 2, 0)

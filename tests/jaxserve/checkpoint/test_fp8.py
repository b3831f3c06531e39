"""Files with FP8 blocks: matrices kept as they are, multiplied out, or in another 8-bit format, and
float files in 8 bits; on one device and cut over several."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.errors import CheckpointError
from jaxserve.mesh import ATTENTION_RULES, Submeshes, cached_sharding
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.colocated_weights import ColocatedWeights
from pallas_kernels.quantize.api import dequantize_weight, quantize_weight
from tests.jaxserve import layouts
from tests.jaxserve.both_roles import load_both
from tests.reference.block_fp8 import block_quantise
from tests.reference.tiny_models import TinyDeepseek, TinyModel

pytestmark = pytest.mark.unoptimised

MODEL = TinyModel(
    "fp8",
    TinyDeepseek(
        hidden_size=192,
        num_attention_heads=4,
        q_lora_rank=136,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        intermediate_size=260,
        moe_intermediate_size=144,
        num_hidden_layers=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=2,
        num_nextn_predict_layers=1,
    ),
    fp8_blocks=True,
)
"""Sizes that are no multiples of 128; MTP modules have scales too."""

LAYOUTS = {
    "1A1F": {},
    "2A2F": {"attention.tp": 2, "ffn.ep": 2},
    "2A4F": {"attention.dp": 2, "ffn.ep": 2, "ffn.tp": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return MODEL.write(tmp_path_factory.mktemp("fp8"), shards=2)


@pytest.fixture(scope="module")
def floats():
    """What the file stands for, FP32."""
    return block_quantise(MODEL.tensors(), dequantised=True)


def blocks(folder, overrides, *, on_cpus=False):
    """Every block as {leaf: NumPy array}, and its template."""
    deployment = layouts.deployment(folder, overrides)
    config, names = read_config(folder)
    meshes = Submeshes(deployment)
    config = msgspec.structs.replace(config, on_cpus=on_cpus)
    templates = ModelTemplates(config, deployment, meshes)
    weights = load_both(HFCheckpoint(folder, names), names, templates, deployment, meshes)
    for layer in range(config.layers):
        kind = config.kind(layer)
        for template, leaves in (
            (templates.attention[kind], weights.attention[layer]),
            (templates.ffn[kind.ffn], weights.ffn[layer]),
        ):
            yield template, dict(zip(template.names, leaves, strict=True))


def matrices(template, leaves):
    """Every quantised matrix of a block as a QuantArray."""
    block = template.merge([leaves[name] for name in template.names])
    for name in leaves:
        if name.endswith(".values"):
            part = block
            for attribute in name.split(".")[:-1]:
                part = getattr(part, attribute)
            yield name.removesuffix(".values"), part[...]


def expected(floats, layer, name):
    """The matrix [out, in] of a leaf, unpadded."""
    prefix = f"model.layers.{layer}."
    role, leaf = name.split(".")
    if role == "experts":
        return np.stack([floats[f"{prefix}mlp.experts.{e}.{leaf}_proj.weight"] for e in range(4)])
    if name == "attention.down":
        downs = ("q_a_proj", "kv_a_proj_with_mqa")
        return np.concatenate([floats[f"{prefix}self_attn.{each}.weight"] for each in downs])
    tensor = {
        "attention.query_up": "self_attn.q_b_proj",
        "attention.out": "self_attn.o_proj",
    }.get(name, f"mlp.{'shared_experts.' if layer else ''}{leaf}_proj")
    return floats[f"{prefix}{tensor}.weight"]


def padded(matrix, shape):
    result = np.zeros(shape, matrix.dtype)
    result[tuple(slice(size) for size in matrix.shape)] = matrix
    return result


def as_uint(array):
    return np.asarray(array).view(np.uint8)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kept_as_they_are(layout, folder, floats):
    seen = 0
    for index, (template, leaves) in enumerate(blocks(folder, layout | {"dtype": "float32"})):
        for name, matrix in matrices(template, leaves):
            wanted = expected(floats, index // 2, name)
            assert matrix.values.dtype == jnp.float8_e4m3fn
            np.testing.assert_array_equal(
                np.asarray(dequantize_weight(matrix, jnp.float32)),
                padded(wanted, matrix.values.shape),
                err_msg=name,
            )
            seen += 1
    assert seen == 2 * 3 + 3 + 6


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multiplied_out(layout, dtype, folder, floats):
    plain = {"dtype": dtype, "attention.weights": dtype, "ffn.weights": dtype}
    for index, (_, leaves) in enumerate(blocks(folder, layout | plain)):
        for name, leaf in leaves.items():
            if name.split(".")[0] in ("experts", "dense") or name.endswith(("query_up", ".out")):
                wanted = padded(expected(floats, index // 2, name), leaf.shape)
                assert leaf.dtype == dtype
                np.testing.assert_array_equal(
                    np.asarray(leaf), wanted.astype(leaf.dtype), err_msg=name
                )
            elif name.endswith(("key_up", "value_up")):
                prefix = f"model.layers.{index // 2}.self_attn.kv_b_proj.weight"
                both = floats[prefix].reshape(4, 48 + 64, 64)
                key, value = both[:, :48], both[:, 48:]
                wanted = key if name.endswith("key_up") else value
                np.testing.assert_array_equal(np.asarray(leaf), wanted.astype(leaf.dtype))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_in_another_format(layout, folder, floats):
    int8 = {"dtype": "float32", "attention.weights": "int8", "ffn.weights": "int8"}
    for index, (template, leaves) in enumerate(blocks(folder, layout | int8)):
        for name, matrix in matrices(template, leaves):
            wanted = padded(expected(floats, index // 2, name), matrix.values.shape)
            whole = quantize_weight(jnp.asarray(wanted), "int8")
            assert matrix.values.dtype == jnp.int8
            np.testing.assert_array_equal(as_uint(matrix.values), as_uint(whole.values))
            np.testing.assert_array_equal(np.asarray(matrix.scales), np.asarray(whole.scales))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_float_files_in_8_bits(layout, weights, floats, tmp_path):
    folder = MODEL.write(tmp_path, dequantised=True)
    wanted_format = {"attention.weights": weights, "ffn.weights": weights}
    for index, (template, leaves) in enumerate(blocks(folder, layout | wanted_format)):
        for name, matrix in matrices(template, leaves):
            wanted = padded(expected(floats, index // 2, name), matrix.values.shape)
            whole = quantize_weight(jnp.asarray(wanted), weights)
            assert matrix.block == (1, 0)
            np.testing.assert_array_equal(as_uint(matrix.values), as_uint(whole.values))
            np.testing.assert_array_equal(np.asarray(matrix.scales), np.asarray(whole.scales))


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("layout", [{}, {"attention.dp": 2, "attention.tp": 2}], ids=str)
def test_stacks_are_the_blocks_stacked(weights, layout, folder):
    overrides = {"attention.weights": weights, "ffn.weights": weights} | layout
    deployment = layouts.deployment(folder, overrides | {"mode": "colocated"})
    config, names = read_config(folder)
    meshes = Submeshes(deployment)
    templates = ModelTemplates(config, deployment, meshes)
    checkpoint = HFCheckpoint(folder, names)
    programs = ColocatedPrograms(templates, deployment, meshes.attention)
    flat = ColocatedWeights(checkpoint, names, programs).flat
    flat = flat[len(templates.embedding.names) + len(templates.head.names) :]
    for kind, start, stop in programs.stacked():
        for template, tables, rules in (
            (templates.attention[kind], names.attention, ATTENTION_RULES),
            (templates.ffn[kind.ffn], names.ffn, meshes.ffn_rules),
        ):
            stacks, flat = flat[: len(template.names)], flat[len(template.names) :]
            shardings = [cached_sharding(meshes.attention, s) for s in template.specs(rules)]
            for layer in range(start, stop):
                leaves = checkpoint.leaves(template, tables[layer], shardings)
                for stack, leaf in zip(stacks, leaves, strict=True):
                    one = stack[layer - start]
                    np.testing.assert_array_equal(as_uint(one), as_uint(leaf))
    assert not flat


class TestProblems:
    def change(self, folder, change):
        tensors = block_quantise(MODEL.tensors())
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            HFCheckpoint(folder, read_config(folder)[1])
        return str(error.value)

    def test_missing_scales_are_all_listed(self, tmp_path):
        def change(tensors):
            del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
            del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]

        folder = MODEL.write(tmp_path)
        assert self.change(folder, change) == (
            f"{folder}: 2 problems:\n"
            "  missing model.layers.0.self_attn.o_proj.weight_scale_inv [2, 2]\n"
            "  missing model.layers.1.mlp.experts.3.up_proj.weight_scale_inv [2, 2]"
        )

    def test_scales_without_a_use_or_of_another_shape(self, tmp_path):
        def change(tensors):
            name = "model.layers.0.self_attn.o_proj.weight"
            tensors[name] = tensors[name].astype(np.float32)
            tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(
                ml_dtypes.float8_e4m3fn
            )

        folder = MODEL.write(tmp_path)
        assert self.change(folder, change) == (
            f"{folder}: 3 problems:\n"
            "  unexpected model.layers.0.self_attn.o_proj.weight_scale_inv\n"
            "  model.layers.0.mlp.up_proj.weight_scale_inv is [2, 2], not [3, 2]\n"
            "  model.norm.weight is F8_E4M3, not one of F64, F32, F16, BF16"
        )

    def test_bfloat16_scales(self, tmp_path):
        folder = MODEL.write(tmp_path)
        tensors = block_quantise(MODEL.tensors())
        for name in tensors:
            if name.endswith("_scale_inv"):
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / "model.safetensors")
        for index, (template, leaves) in enumerate(blocks(folder, {})):
            for name, matrix in matrices(template, leaves):
                if name == "dense.up":
                    tensor = f"model.layers.{index // 2}.mlp.up_proj.weight_scale_inv"
                    if tensor in tensors:
                        np.testing.assert_array_equal(
                            np.asarray(matrix.scales), tensors[tensor].astype(np.float32)
                        )


def test_config_may_say_nothing_of_it(folder, floats, tmp_path):
    """The files' dtypes decide; where config.json does not speak of FP8, matrices come out as
    floats."""
    other = MODEL.write(tmp_path)
    tree = json.loads((other / "config.json").read_text())
    del tree["quantization_config"]
    (other / "config.json").write_text(json.dumps(tree))
    (_, leaves), *_ = blocks(other, {"dtype": "float32"})
    np.testing.assert_array_equal(
        np.asarray(leaves["attention.out"]), expected(floats, 0, "attention.out")
    )
    assert jax.block_until_ready(leaves["attention.out"]).dtype == jnp.float32

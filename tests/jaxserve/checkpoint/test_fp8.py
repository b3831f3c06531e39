"""Files with FP8 blocks: matrices kept as they are, multiplied out, or in another 8-bit format, and
float files in 8 bits; on one device and cut over several."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.formats import FORMATS
from jaxserve.errors import CheckpointError
from pallas_kernels.quantize.api import dequantize_weight, quantize_weight
from tests import golden
from tests.jaxserve.checkpoint.opened import Opened, bits, edit_config
from tests.pallas_kernels.nightly import nightly
from tests.reference.block_fp8 import block_quantise
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyDeepseek

pytestmark = pytest.mark.unoptimised

SIZES = yaml.safe_load(golden.text("checkpoint/fp8_sizes.yaml"))
MODEL = TinyModel("fp8", TinyDeepseek(**SIZES), fp8_blocks=True)
"""Prediction modules have scales too."""

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
    """The file's values, FP32."""
    return block_quantise(MODEL.tensors(), dequantised=True)


def expected(floats, layer, name):
    """The matrix [out, in] of a leaf, unpadded."""
    prefix = f"model.layers.{layer}."
    role, leaf = name.split(".")
    if role == "experts":
        return np.stack([floats[f"{prefix}mlp.experts.{e}.{leaf}_proj.weight"] for e in range(4)])
    if name == "attention.down":
        downs = ("q_a_proj", "kv_a_proj_with_mqa")
        return np.concatenate([floats[f"{prefix}self_attn.{each}.weight"] for each in downs])
    tensor = {"attention.query_up": "self_attn.q_b_proj", "attention.out": "self_attn.o_proj"}.get(
        name, f"mlp.{'shared_experts.' if layer else ''}{leaf}_proj"
    )
    return floats[f"{prefix}{tensor}.weight"]


def padded(matrix, shape):
    result = np.zeros(shape, matrix.dtype)
    result[tuple(slice(size) for size in matrix.shape)] = matrix
    return result


@pytest.mark.parametrize("layout", ["1A1F", *nightly("2A2F"), "2A4F"])
def test_kept_as_they_are(layout, folder, floats):
    found = list(Opened(folder, LAYOUTS[layout]).quantised())
    assert len(found) == 2 * 3 + 3 + 6
    for layer, name, matrix in found:
        assert matrix.values.dtype == jnp.float8_e4m3fn
        wanted = padded(expected(floats, layer, name), matrix.values.shape)
        kept = np.asarray(dequantize_weight(matrix, jnp.float32))
        np.testing.assert_array_equal(kept, wanted, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("1A1F", "float32"), *nightly(("2A2F", "bfloat16")), ("2A4F", "bfloat16")]
)
def test_multiplied_out(layout, dtype, folder, floats):
    plain = {"dtype": dtype, "attention.weights": dtype, "ffn.weights": dtype}
    for layer, _, leaves in Opened(folder, LAYOUTS[layout] | plain).blocks():
        both = floats[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].reshape(4, 128 + 64, 64)
        tiled = both[:, None, :128].swapaxes(2, 3)
        split = {"attention.key_up": tiled, "attention.value_up": both[:, 128:]}
        for name, leaf in leaves.items():
            if name.split(".")[0] in ("experts", "dense") or name.endswith(("query_up", ".out")):
                wanted = padded(expected(floats, layer, name), leaf.shape)
                assert leaf.dtype == dtype
            elif (wanted := split.get(name)) is None:
                continue
            given = wanted.astype(leaf.dtype)
            np.testing.assert_array_equal(np.asarray(leaf), given, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "weights", "dequantised"),
    [
        ("2A4F", "int8", False),
        ("1A1F", "int8", True),
        ("2A4F", "fp8", True),
        *nightly(("1A1F", "int8", False), ("2A2F", "fp8", True), ("2A4F", "int8", True)),
    ],
)
def test_in_another_format(layout, weights, dequantised, floats, tmp_path):
    """Files with FP8 blocks, or with floats, in 8 bits, as if quantised as a whole."""
    folder = MODEL.write(tmp_path, dequantised=dequantised)
    formats = {"attention.weights": weights, "ffn.weights": weights}
    for layer, name, matrix in Opened(folder, LAYOUTS[layout] | formats).quantised():
        assert (matrix.dtype.name, matrix.block) == (FORMATS[weights].dtype, (1, 0))
        wanted = padded(expected(floats, layer, name), matrix.values.shape)
        whole = quantize_weight(jnp.asarray(wanted), weights)
        np.testing.assert_array_equal(bits(matrix.values), bits(whole.values))
        np.testing.assert_array_equal(np.asarray(matrix.scales), np.asarray(whole.scales))


class TestProblems:
    def test_of_scales(self, tmp_path):
        """Missing ones, those of plain matrices or of another shape, and FP8 without scales."""
        folder = MODEL.write(tmp_path)
        tensors = block_quantise(MODEL.tensors())
        del tensors["model.layers.0.mlp.gate_proj.weight_scale_inv"]
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
        for name, dtype in (
            ("model.layers.0.self_attn.o_proj.weight", np.float32),
            ("model.norm.weight", ml_dtypes.float8_e4m3fn),
        ):
            tensors[name] = tensors[name].astype(dtype)
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            HFCheckpoint(folder, read_config(folder)[1])
        message = str(error.value).replace(str(folder), "FOLDER")
        golden.check("checkpoint/scales.txt", message + "\n")

    def test_bfloat16_scales(self, tmp_path):
        folder = MODEL.write(tmp_path)
        tensors = block_quantise(MODEL.tensors())
        for name in tensors:
            if name.endswith("_scale_inv"):
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / "model.safetensors")
        for layer, name, matrix in Opened(folder).quantised():
            scales = tensors.get(f"model.layers.{layer}.mlp.up_proj.weight_scale_inv")
            if name == "dense.up" and scales is not None:
                np.testing.assert_array_equal(np.asarray(matrix.scales), scales.astype(np.float32))


def test_config_may_say_nothing_of_it(folder, floats, tmp_path):
    """The files' dtypes decide. Without FP8 in config.json, matrices come out as floats."""
    other = MODEL.write(tmp_path)
    edit_config(other, quantization_config=None)
    (_, _, leaves), *_ = Opened(other, {"dtype": "float32"}).blocks()
    found = np.asarray(leaves["attention.out"])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected(floats, 0, "attention.out"))

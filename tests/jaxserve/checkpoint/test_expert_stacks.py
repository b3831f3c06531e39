"""gpt-oss's experts: MXFP4, as released, and the floats that transformers writes, are the same."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.errors import CheckpointError
from jaxserve.fleet.assembly import build_runtime
from pallas_kernels.quantize import E8M0
from tests import golden
from tests.jaxserve.checkpoint.opened import Opened, changed, edit_config
from tests.jaxserve.test_parity import CHUNKED, COLOCATED, Expected, check_logits, llm_tokens
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyGptOss

pytestmark = pytest.mark.unoptimised

EXPERTS, D, D_FF = 4, 64, 96
SIZES = TinyGptOss(
    hidden_size=D, intermediate_size=D_FF, num_hidden_layers=2, num_local_experts=EXPERTS
)
MODEL = TinyModel("gpt_oss", SIZES)
PARTS = {"gate_up_proj": (2 * D_FF, D), "down_proj": (D, D_FF)}


def packed(rng: np.random.Generator, d_out: int, d_in: int) -> tuple[np.ndarray, np.ndarray]:
    grid = EXPERTS, d_out, d_in // 32
    return rng.integers(0, 256, (*grid, 16), np.uint8), rng.integers(120, 124, grid, np.uint8)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[experts, d_out, d_in], from the dtypes of ml_dtypes."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    numbers = values.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return numbers.reshape(*scales.shape[:2], -1).astype(np.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model twice, and the numbers of its experts by tensor."""
    rng, numbers = np.random.default_rng(0), {}
    floats, mxfp4 = (MODEL.write(tmp_path_factory.mktemp(name)) for name in ("floats", "mxfp4"))
    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in MODEL.tensors().items()}
    stored = dict(tensors)
    for layer in range(2):
        for part, shape in PARTS.items():
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales = packed(rng, *shape)
            numbers[name] = dequantised(blocks, scales)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = np.ascontiguousarray(np.swapaxes(numbers[name], 1, 2)).astype(
                ml_dtypes.bfloat16
            )
    save_file(tensors, floats / "model.safetensors")
    save_file(stored, mxfp4 / "model.safetensors")
    edit_config(mxfp4, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return floats, mxfp4, numbers


@pytest.mark.parametrize("on_cpus", [False, True])
@pytest.mark.parametrize(
    ("which", "weights"), [(0, "auto"), (0, "mxfp4"), (1, "auto"), (1, "float32")]
)
def test_gate_and_up_take_turns(folders, which, weights, on_cpus):
    """In shards of a third of a block and more, and in tiles; whole blocks stay MXFP4."""
    layout = {"attention.dp": 2, "ffn.ep": 2, "ffn.tp": 2, "ffn.weights": weights}
    opened, numbers = Opened(folders[which], layout, on_cpus=on_cpus), folders[2]
    assert opened.config.floats == "bfloat16"
    held = weights == "mxfp4" or (which, weights) == (1, "auto")
    for layer, _, leaves in opened.blocks():
        if "experts.bias" not in leaves:
            assert leaves["attention.sinks"].shape == (6,)
            continue
        both, down = (numbers[f"model.layers.{layer}.mlp.experts.{part}"] for part in PARTS)
        wanted = {"gate": both[:, ::2], "up": both[:, 1::2], "down": down}
        for name, matrix in wanted.items():
            if held:
                values, scales = (leaves[f"experts.{name}.{part}"] for part in ("values", "scales"))
                assert (values.dtype, scales.dtype) == (ml_dtypes.float4_e2m1fn, E8M0)
                scale = np.repeat(np.asarray(scales, np.float32), 32, axis=-1)
                leaf = np.asarray(values, np.float32) * scale
                padding = [(0, n - m) for n, m in zip(leaf.shape, matrix.shape, strict=True)]
                assert sum(last for _, last in padding) == 32  # 96 columns are 2 · 64 on 2 devices
                matrix = np.pad(matrix, padding)
            else:
                leaf = np.asarray(leaves[f"experts.{name}"], np.float32)
                if on_cpus:
                    leaf = np.swapaxes(leaf, -1, -2).reshape(matrix.shape)
            np.testing.assert_array_equal(leaf, matrix)
        bias = MODEL.tensors()[f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"]
        given = bias.astype(ml_dtypes.bfloat16).astype(leaves["experts.bias"].dtype)
        np.testing.assert_array_equal(np.asarray(leaves["experts.bias"])[:, : 2 * D_FF], given)


@pytest.mark.parametrize("layout", [{"attention.dp": 2, "ffn.ep": 2}, {"ffn.tp": 2}], ids=str)
def test_tokens_are_those_of_the_numbers_as_floats(folders, layout):
    floats, mxfp4, _ = folders
    assert llm_tokens(mxfp4, CHUNKED | layout) == Expected.numpy(floats).tokens


def test_logits_are_those_of_the_numbers_as_floats(folders):
    runtime = build_runtime(load_deployment(folders[1], COLOCATED))
    check_logits(runtime, Expected.numpy(folders[0]), 16)


def test_scales_that_are_missing_and_wrong_shapes_are_told(folders, tmp_path):
    folder = MODEL.write(tmp_path)
    names = read_config(folder)[1]
    with changed(folder) as tensors:
        for layer, part in ((0, "down_proj"), (1, "gate_up_proj")):
            del tensors[f"model.layers.{layer}.mlp.experts.{part}"]
        blocks, _ = packed(np.random.default_rng(0), D, D_FF)
        tensors["model.layers.0.mlp.experts.down_proj_blocks"] = blocks[:, :, :2]
        tensors["model.layers.1.mlp.experts.down_proj"] = np.zeros((4, 96, 63), np.float32)
    with pytest.raises(CheckpointError) as error:
        HFCheckpoint(folder, names)
    message = str(error.value).replace(str(folder), "FOLDER")
    golden.check("checkpoint/expert_stacks.txt", message + "\n")

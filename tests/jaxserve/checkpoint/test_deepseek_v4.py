"""DeepSeek-V4's released layout: its names, FP8 matrices with scales that are powers of two, and
experts in FP4. The tokens are those of a folder with the same numbers as floats."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.verification import verify
from tests.jaxserve import layouts
from tests.jaxserve.test_deepseek_v4 import GREEDY, loaded
from tests.reference.tiny_deepseek_v4 import LONG, TinyDeepseekV4, TinyV4

pytestmark = pytest.mark.unoptimised

SIZES = TinyDeepseekV4(changed=(("hidden_size", 64), ("moe_intermediate_size", 32)))
MODEL = TinyV4("released", SIZES, spelling="transformers 5", sigma=0.2)
FP8 = re.compile(r"attn\.(w|indexer\.wq_b)|shared_experts")


def released(name: str) -> str:
    """Name of a tensor in the released folders."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return name.replace("attn.norm", "attn.kv_norm").replace("hc_head.hc_", "hc_head_")


def quantised(name: str, tensor: np.ndarray, rng: np.random.Generator):
    """The tensors of a released folder for one matrix, and the numbers that they stand for."""
    rows, columns = tensor.shape
    if ".experts." in name and "shared" not in name:
        codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, columns)
        values = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        exponents, spread = rng.integers(122, 126, (rows, columns // 32), np.uint8), (1, 32)
        stored = codes.view(np.int8)
    elif FP8.search(name):
        grid = -(-rows // 128), -(-columns // 128)
        exponents, spread = rng.integers(124, 128, grid, np.uint8), (128, 128)
        stored = (tensor * 2).astype(ml_dtypes.float8_e4m3fn)
        values = stored.astype(np.float32)
    else:
        return {name: tensor}, tensor
    scales = np.exp2(exponents.astype(np.float32) - 127)
    scales = scales.repeat(spread[0], 0).repeat(spread[1], 1)[:rows, :columns]
    power = exponents.view(ml_dtypes.float8_e8m0fnu)
    return {name: stored, name.replace(".weight", ".scale"): power}, values * scales


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    rng, files, floats = np.random.default_rng(0), {}, {}
    for name, tensor in MODEL.tensors().items():
        if tensor.ndim == 2 and tensor.dtype == np.float32:
            parts, floats[name] = quantised(name, tensor, rng)
        else:
            parts = {name: tensor}
            floats[name] = tensor
        files |= {released(part): value for part, value in parts.items()}
    files["mtp.0.norm.weight"] = np.ones(64, np.float32)
    made = MODEL.write(tmp_path_factory.mktemp("floats")), tmp_path_factory.mktemp("released")
    save_file(floats, made[0] / "model.safetensors")
    save_file(files, made[1] / "model.safetensors")
    entries = SIZES.config("released") | {"expert_dtype": "fp4", "torch_dtype": "bfloat16"}
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    entries["quantization_config"] = blocks | {"activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    # Compressed rows of 32 tokens, as the other folder has.
    rates = json.loads((made[0] / "config.json").read_text())["compress_rates"]
    (made[1] / "config.json").write_text(json.dumps(entries | {"compress_rates": rates}))
    (made[1] / "tokenizer.json").write_text((made[0] / "tokenizer.json").read_text())
    return made


def test_tokens_are_those_of_the_numbers_as_floats(folders, tmp_path):
    """So are those of the released folder after its conversion."""
    found = []
    convert(folders[1], tmp_path / "converted")
    assert verify(tmp_path / "converted") == []
    for folder in (*folders, tmp_path / "converted"):
        with layouts.serving(loaded(folder)) as engine:
            found.append(layouts.generate(engine, LONG.questions(), GREEDY))
    assert found[0] == found[1] == found[2]
    config, _ = read_config(folders[1])
    assert config.stored == "mxfp4"
    assert config.plain_parts == {"attention", "dense"}

"""Folders of the Hub's own writers, to the last bit of what these make of them.

`golden/gptqmodel.*`: GPTQModel 7.7.0 with torch 2.9.1 quantised a random Qwen3 of one layer
(hidden 64, 2 query heads and, but for AWQ, one KV head of 32) on 16 texts of 64 random tokens, once
with each setting below (2026-11-23). Of every folder the parts of `layers.0.self_attn.k_proj` and
its `quantization_config` are here, and what the library's plain PyTorch dequantisation makes of
them, with its scales in FP32.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.packed import PackedTensor, Packing, join_parts, read_packed
from jaxserve.checkpoint.quantization_config import packing_of, stored_format
from jaxserve.checkpoint.reading import Region
from jaxserve.checkpoint.tensors import list_tensors

GOLDEN = Path(__file__).parent / "golden"
GPTQMODEL = {  # what a matrix is kept in; its bits and group
    "gptq": ("int4", 4, 32),
    "gptq desc_act": ("plain", 4, 32),
    "gptq asymmetric": ("int4", 4, 32),
    "gptq_v2": ("int4", 4, 32),
    "gptq 2": ("plain", 2, 32),
    "gptq 3": ("plain", 3, 32),
    "gptq 8": ("plain", 8, 0),
    "gptq dynamic": ("plain", 8, 0),  # k_proj has 8 bits in groups of 64, v_proj is plain
    "awq": ("int4", 4, 32),
    "awq symmetric": ("int4", 4, 32),
}


def check(
    folder: Path, section: Any, parts: dict[str, np.ndarray], cut: tuple[slice, slice]
) -> Packing:
    """That a loader reads a rectangle of the matrix of these parts as the library does; returns how
    it is packed."""
    expected = parts.pop("weight")
    if parts["scales"].dtype == np.int16:  # NumPy has no BF16
        parts["scales"] = parts["scales"].view(ml_dtypes.bfloat16)
    save_file({f"m.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    packing = packing_of({"quantization_config": section})
    assert packing is not None
    tensors = list_tensors(folder).tensors
    joined, problems = join_parts(tensors, {"m.weight": expected.shape}, packing)
    assert (list(joined), problems) == (["m.weight"], [])
    tensor, wanted, width = joined["m.weight"], expected[cut], expected.shape[1]
    assert isinstance(tensor, PackedTensor)
    target = np.empty(wanted.shape, np.float32)
    first = (cut[0].start or 0) * width + (cut[1].start or 0)
    read_packed(Region(tensor, first, width, *wanted.shape, target), lambda _: None)
    np.testing.assert_array_equal(target, wanted)
    return tensor.packing


@pytest.mark.parametrize("name", GPTQMODEL)
def test_gptqmodel(name: str, tmp_path: Path) -> None:
    section = json.loads((GOLDEN / "gptqmodel.json").read_text())[name]
    with np.load(GOLDEN / "gptqmodel.npz") as file:
        arrays = {key: file[key] for key in file.files}
    stored, bits, group = GPTQMODEL[name]
    entries = Entries({"quantization_config": section})
    assert (stored_format(entries), entries.problems) == (stored, [])
    for cut in (slice(None), slice(None)), (slice(5, 31), slice(33, 62)):
        parts = {k.split("/")[1]: v for k, v in arrays.items() if k.split("/")[0] == name}
        packing = check(tmp_path, section, parts, cut)
        assert (packing.bits, packing.group) == (bits, group)

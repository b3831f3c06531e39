"""Folders of the Hub's own writers, to the last bit of what these make of them.

`golden/gptqmodel.*`: GPTQModel 7.7.0 with torch 2.9.1 quantised a random Qwen3 of one layer
(hidden 64, 2 query heads and, but for AWQ, one KV head of 32) on 16 texts of 64 random tokens, once
with each setting below (2026-11-23). Of every folder the parts of `layers.0.self_attn.k_proj` and
its `quantization_config` are here, and what the library's plain PyTorch dequantisation makes of
them, with its scales in FP32.

`golden/llm_compressor.*` are made alike by `golden/llm_compressor.py`.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.packed import PackedTensor, Packing, join_parts
from jaxserve.checkpoint.packed_values import read_packed
from jaxserve.checkpoint.quantization_config import packing_of, stored_format
from jaxserve.checkpoint.reading import read_regions
from jaxserve.checkpoint.regions import source_regions
from jaxserve.checkpoint.source import matrix
from jaxserve.checkpoint.tensors import list_tensors
from tests import golden

GOLDEN = Path(__file__).parent / "golden"
GPTQMODEL = yaml.safe_load(golden.text("checkpoint/gptqmodel.yaml"))


def check(
    folder: Path, section: Any, parts: dict[str, np.ndarray], cut: tuple[slice, slice]
) -> Packing:
    """Checks that a loader reads a rectangle as the library does; returns its packing."""
    expected = parts.pop("expected")
    stored = {name: as_stored(name, part) for name, part in parts.items()}
    save_file({f"m.{name}": part for name, part in stored.items()}, folder / "model.safetensors")
    packing = packing_of({"quantization_config": section})
    assert packing is not None
    tensors = list_tensors(folder).tensors
    joined, problems = join_parts(tensors, {"m.weight": expected.shape}, packing)
    grids = {}
    if packing.layout == "fp8_block":  # in DeepSeek's naming
        joined.pop("m.weight_scale_inv")
        grids["m.weight"] = stored["weight_scale"].astype(np.float32)
    assert (list(joined), problems) == (["m.weight"], [])
    tensor, wanted = joined["m.weight"], expected[cut]
    target = np.empty(wanted.shape, np.float32)
    rows, columns = expected.shape
    ranges = cut[0].indices(rows)[:2], cut[1].indices(columns)[:2]
    source = matrix("m.weight", *expected.shape)
    for region in source_regions(source, joined, grids, ranges, target):
        if isinstance(region.tensor, PackedTensor):
            read_packed(region, lambda _: None)
        else:
            read_regions([region], lambda _: None)
    np.testing.assert_array_equal(target, wanted)
    return tensor.packing if isinstance(tensor, PackedTensor) else packing


def as_stored(name: str, part: np.ndarray) -> np.ndarray:
    """In its own dtype, where NumPy has none of it."""
    own = {np.int16: ml_dtypes.bfloat16, np.uint8: ml_dtypes.float8_e4m3fn}
    return part.view(own.get(part.dtype.type, part.dtype))


def stored_by(writer: str, name: str) -> tuple[Any, dict[str, dict[str, np.ndarray]]]:
    """The section of a folder, and by matrix the parts; what it is dequantised to is `expected`."""
    section = json.loads((GOLDEN / f"{writer}.json").read_text())[name]
    parts: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDEN / f"{writer}.npz") as file:
        for key in file.files:
            of, *matrix, part = key.split("/")
            if of == name:
                parts.setdefault("/".join(matrix), {})[part] = file[key]
    return section, parts


CUTS = (slice(None), slice(None)), (slice(5, 31), slice(33, 62))


@pytest.mark.parametrize("name", GPTQMODEL)
def test_gptqmodel(name: str, tmp_path: Path) -> None:
    section, matrices = stored_by("gptqmodel", name)
    stored, bits, group = GPTQMODEL[name]
    entries = Entries({"quantization_config": section})
    assert (stored_format(entries), entries.problems) == (stored, [])
    for cut in CUTS:
        parts = dict(matrices[""])
        parts["expected"] = parts.pop("weight")
        packing = check(tmp_path, section, parts, cut)
        assert (packing.bits, packing.group) == (bits, group)


LLM_COMPRESSOR = yaml.safe_load(golden.text("checkpoint/llm_compressor.yaml"))


@pytest.mark.parametrize("name", LLM_COMPRESSOR)
def test_llm_compressor(name: str, tmp_path: Path) -> None:
    section, matrices = stored_by("llm_compressor", name)
    stored, packings = LLM_COMPRESSOR[name]
    entries = Entries({"quantization_config": section})
    assert (stored_format(entries), entries.problems) == (stored, [])
    assert matrices.keys() == packings.keys()
    for module, parts in matrices.items():
        for cut in CUTS:
            packing = check(tmp_path, section, dict(parts), cut)
            assert [*packing[:3]] == packings[module]


def test_llm_compressor_refused() -> None:
    found = {}
    for name in ("nvfp4", "mxfp4", "mxfp8", "w3a16", "w4a8", "w4afp8"):
        entries = Entries({"quantization_config": stored_by("llm_compressor", name)[0]})
        stored_format(entries)
        found[name] = entries.problems
    golden.check("checkpoint/refused_sections.json", found)

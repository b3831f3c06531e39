"""The Hub's quantised formats (`packed_folders.py`): as floats, or kept as they are stored."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint import arrays, conversion
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.packed import join_parts
from jaxserve.checkpoint.packed_values import read_packed
from jaxserve.checkpoint.quantization_config import packing_of
from jaxserve.checkpoint.reading import Region, aligned_empty
from jaxserve.checkpoint.tensors import list_tensors
from jaxserve.config.model import Int4
from jaxserve.errors import CheckpointError
from pallas_kernels import input_major
from tests.jaxserve.checkpoint.opened import Opened, changed, edit_config, matrices
from tests.jaxserve.checkpoint.packed_folders import (
    DYNAMIC,
    FORMATS,
    FP8,
    FP8_BLOCKS,
    FP8_TENSOR,
    GPTQ,
    GROUP,
    SIZES,
    W8A8,
    Packer,
    compressed,
    several,
    write,
)
from tests.jaxserve.roles.test_weights import row_by_row


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inside", [(0, 48, 0, 64), (3, 21, 37, 59)], ids=["all", "odd"])
def test_numbers_are_what_the_parts_stand_for(name, inside, tmp_path):
    section, pack = FORMATS[name]
    parts, matrix = pack("m.", (48, 64))
    contiguous = {part: np.ascontiguousarray(values) for part, values in parts.items()}
    save_file(contiguous, tmp_path / "model.safetensors")
    listing = list_tensors(tmp_path)
    packing = packing_of({"quantization_config": section})
    joined, problems = join_parts(listing.tensors, {"m.weight": (48, 64)}, packing)
    assert (list(joined), problems) == (["m.weight"], [])
    top, bottom, left, right = inside
    target = np.empty((bottom - top, right - left), np.float32)
    region = Region(joined["m.weight"], top * 64 + left, 64, *target.shape, target)
    read_packed(region, lambda size: None)
    np.testing.assert_allclose(target, matrix[top:bottom, left:right], rtol=1e-6, atol=1e-9)


PROJECTIONS = {
    f"attention.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "out")
}


def expected(stand_for, layer, name):
    """The matrix or stack of a leaf."""
    prefix = f"model.layers.{layer}."
    if name in PROJECTIONS:
        return stand_for[f"{prefix}{PROJECTIONS[name]}.weight"]
    part = name.removeprefix("experts.")
    experts = range(SIZES.num_experts)
    return np.stack([stand_for[f"{prefix}mlp.experts.{e}.{part}_proj.weight"] for e in experts])


def as_floats(matrix):
    """A quantised matrix in float64."""
    values = np.asarray(matrix.values).astype(np.float64)
    group = matrix.block[1] or values.shape[-1]
    if matrix.zeros is not None:
        values -= np.repeat(np.asarray(matrix.zeros, np.float64), group, -1)
    return values * np.repeat(np.asarray(matrix.scales, np.float64), group, -1)


def check(opened, stand_for, dtypes):
    """Compares all matrices of a folder, in these dtypes by part; the others are floats."""
    seen = 0
    for layer, template, leaves in opened.blocks():
        kept = dict(matrices(template, leaves))
        found = {name: as_floats(matrix) for name, matrix in kept.items()}
        stacks = ("experts.gate", "experts.up", "experts.down")
        found |= {name: leaves[name] for name in leaves if name in (*PROJECTIONS, *stacks)}
        for name, values in found.items():
            part = "attention" if name in PROJECTIONS else "experts"
            dtype = kept[name].dtype if name in kept else values.dtype
            assert str(dtype) == dtypes.get(part, "float32")
            rows = row_by_row(values) if opened.config.platform == "cpu" else values
            wanted = expected(stand_for, layer, name)
            padded = np.zeros(rows.shape)
            padded[tuple(slice(size) for size in wanted.shape)] = wanted
            np.testing.assert_allclose(rows, padded, rtol=1e-6, atol=1e-9)
            seen += 1
    assert seen == 7 * opened.config.layers


def channels(dtype, one=None):
    return lambda *a: Packer().channels(*a, dtype=dtype, one=one)


IN_ORDER = GPTQ | {"desc_act": False}
ZEROS, NONE = Int4(GROUP, zero_points=True), Int4(GROUP)
CUT = {"attention.tp": 2, "ffn.ep": 2, "ffn.tp": 2}
F8 = ml_dtypes.float8_e4m3fn
WHOLE = {
    "gptq shuffled": (*FORMATS["gptq shuffled"], "plain", "float32"),  # columns in their own order
    "w8a8": (compressed("int-quantized", W8A8, DYNAMIC), channels(np.int8), "int8", "int8"),
    "fp8": (compressed("float-quantized", FP8, DYNAMIC), channels(F8), "fp8", "float8_e4m3fn"),
    "fp8 tensor": (
        compressed("float-quantized", FP8_TENSOR, DYNAMIC),
        channels(F8, one=(1,)),
        *("fp8", "float8_e4m3fn"),
    ),
    "awq": (*FORMATS["awq"], ZEROS, "int4"),
    "gptq": (IN_ORDER, FORMATS["gptq"][1], ZEROS, "int4"),
    "auto-round": (*FORMATS["auto-round"], ZEROS, "int4"),
    "w4a16": (*FORMATS["w4a16"], NONE, "int4"),
}


@pytest.mark.unoptimised
@pytest.mark.parametrize("name", WHOLE)
def test_folders_of_one_format(name, tmp_path):
    """On four devices, each with whole groups; the padding has no weights."""
    section, pack, stored, dtype = WHOLE[name]
    stand_for = write(tmp_path, section, pack)
    opened = Opened(tmp_path, CUT)
    if isinstance(stored, Int4):
        assert opened.config.int4 == stored
        stored = "int4"
    assert (opened.config.stored, opened.config.plain_parts) == (stored, frozenset())
    check(opened, stand_for, {"attention": dtype, "experts": dtype})


@pytest.mark.unoptimised
@pytest.mark.parametrize("name", ["gptq shuffled", "w8a8"])
def test_floats_in_tiles(name, tmp_path, monkeypatch):
    """The form for CPUs: several tiles a device and a padded d_ff; new memory is never zero."""
    monkeypatch.setattr(input_major, "TILE", 16)
    monkeypatch.setattr(arrays, "aligned_empty", lambda *a: np.full_like(aligned_empty(*a), np.nan))
    stand_for = write(tmp_path, *FORMATS[name])
    floats = {"attention.weights": "float32", "ffn.weights": "float32"}
    cut = floats | {"attention.tp": 2, "ffn.tp": 3}
    check(Opened(tmp_path, cut, on_cpus=True), stand_for, {})


OWN_NUMBERS = {
    "int4 and int8": (
        several(FORMATS["w8a8"][0], FORMATS["w4a16"][0]),
        {True: FORMATS["w4a16"][1], False: FORMATS["w8a8"][1]},
    ),
    "int8 and fp8 blocks": (
        several(compressed("float-quantized", FP8_BLOCKS), FORMATS["w8a8"][0]),
        {True: FORMATS["w8a8"][1], False: channels(F8, one=(1, 1))},
    ),
    "gptq": (
        IN_ORDER | {"sym": False, "dynamic": {"+:.*experts.*": {"bits": 8, "group_size": 64}}},
        {True: FORMATS["gptq"][1], False: lambda *a: Packer(bits=8, group=64).gptq(*a)},
    ),
}


@pytest.mark.unoptimised
@pytest.mark.parametrize("name", OWN_NUMBERS)
def test_parts_with_other_numbers_become_floats(name, tmp_path):
    """Attention keeps its format, experts have another."""
    section, pack = OWN_NUMBERS[name]
    stand_for = write(tmp_path, section, lambda base, *a: pack["self_attn" in base](base, *a))
    kept = "int8" if "int8" in name.split()[0] else "int4"
    opened = Opened(tmp_path)
    assert (opened.config.stored, opened.config.plain_parts) == (kept, {"experts"})
    check(opened, stand_for, {"attention": kept})


def test_int4_stays_in_its_groups_and_whole(tmp_path):
    """Neither other groups nor a stack that is only partly INT4 can be had from it."""
    section, pack = FORMATS["w4a16"]
    write(tmp_path, section, pack)
    assert conversion._read(tmp_path, (), 0, "int4", GROUP)[0].int4.group == GROUP
    with pytest.raises(CheckpointError, match=f"in groups of {GROUP}, and not 128"):
        conversion._read(tmp_path, (), 0, "int4", 128)
    wide = {"+:.*experts.1.*": {"bits": 8, "group_size": 64}}
    packers = {True: Packer(bits=8, group=64).gptq, False: Packer().gptq}
    write(
        tmp_path,
        IN_ORDER | {"dynamic": wide},
        lambda base, *a: packers["experts.1." in base](base, *a),
    )
    opened = Opened(tmp_path, {"ffn.weights": "int4"})
    with pytest.raises(CheckpointError, match="not all in INT4"):
        list(opened.blocks())


@pytest.mark.parametrize(
    ("name", "held"), [("w4a16", "bfloat16"), ("w8a16", "float32"), ("gptq", "float32")]
)
def test_what_becomes_floats_does_not_fit_bf16(name, held, tmp_path):
    """Beside BF16 in everything that the folder leaves out; codes times scales have more bits."""
    write(tmp_path, *FORMATS[name])
    with changed(tmp_path) as tensors:
        for each, values in tensors.items():
            if values.dtype == np.float32:
                tensors[each] = values.astype(ml_dtypes.bfloat16)
    assert read_config(tmp_path)[0].floats == held


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_parts_that_are_floats_stay_floats(name, tmp_path):
    """The form of Kimi K2 Thinking's attention."""
    write(tmp_path, *FORMATS[name])
    assert read_config(tmp_path)[0].plain_parts == frozenset()
    with changed(tmp_path) as tensors:
        for base in {each.rpartition(".")[0] for each in tensors if "self_attn.q_proj" in each}:
            shape = tensors.get(f"{base}.weight_shape", (64, SIZES.hidden_size))
            for part in [each for each in tensors if each.startswith(f"{base}.weight")]:
                del tensors[part]
            tensors[f"{base}.weight"] = np.ones(shape, np.float32)
    assert read_config(tmp_path)[0].plain_parts == {"attention"}


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda *a: Packer().gptq(*a, shuffled=True), "g_idx has columns in an order of their own"),
        (lambda *a: Packer().gptq(*a), "sym is true, and there are zero points"),
    ],
)
def test_what_config_json_does_not_say(pack, message, tmp_path):
    write(tmp_path, IN_ORDER | {"sym": True}, pack)
    with pytest.raises(CheckpointError, match=message):
        next(Opened(tmp_path).blocks())


def test_a_section_in_a_file_of_its_own(tmp_path):
    """The form in which AutoGPTQ wrote it before transformers knew of it."""
    write(tmp_path, *FORMATS["gptq"])
    (tmp_path / "quantize_config.json").write_text("{}")
    edit_config(tmp_path, quantization_config=None)
    message = r"config.json has no quantization_config, and there is quantize_config.json: put it"
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_parts_that_are_missing_or_of_another_shape(tmp_path):
    write(tmp_path, GPTQ, FORMATS["gptq"][1])
    base = "model.layers.0.self_attn.q_proj."
    with changed(tmp_path) as tensors:
        del tensors[f"{base}scales"]
        tensors[f"{base}qzeros"] = tensors[f"{base}qzeros"][:, 1:].copy()
    wide = SIZES.num_attention_heads * SIZES.head_dim
    with pytest.raises(CheckpointError) as error:
        HFCheckpoint(tmp_path, read_config(tmp_path)[1])
    assert str(error.value).splitlines()[1:] == [
        f"  {base}qzeros is [2, {wide // 8 - 1}], not [2, {wide // 8}]",
        f"  missing {base}scales [2, {wide}]",
    ]

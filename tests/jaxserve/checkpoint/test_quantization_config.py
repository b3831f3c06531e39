"""`quantization_config` of released files, and what is refused of it.

`test_golden.py` has whole sections as GPTQModel and LLM Compressor write them.
"""

from typing import Any

import pytest

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.packed import Packing
from jaxserve.checkpoint.quantization_config import Quantisation, quantisation, stored_format
from tests import golden
from tests.jaxserve.checkpoint.packed_folders import (
    DYNAMIC,
    FP8,
    FP8_BLOCKS,
    FP8_TENSOR,
    W4A16,
    W8A8,
    W8A16,
    compressed,
    several,
)

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AUTO_GPTQ = GPTQ | dict.fromkeys(
    ("meta", "damp_percent", "true_sequential", "model_name_or_path", "model_file_base_name"), "x"
)
GPTQMODEL = GPTQ | {"format": "gptq", "method": "gptq", "pack_dtype": "int32"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQMODEL_AWQ = AWQ | {"format": "gemm", "method": "awq", "pack_dtype": "int32", "sym": None}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int"} | {
    "packing_format": "auto_round:auto_gptq",
    **dict.fromkeys(("autoround_version", "block_name_to_quantize", "enable_quanted_input"), "x"),
}
KIMI = compressed("pack-quantized", W4A16)
INT8 = compressed("int-quantized", W8A8, DYNAMIC)
CACHE = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def int4(*packing: Any, **more: Any) -> Quantisation:
    return Quantisation("int4", Packing(*packing, **more))


def plain(*packing: Any, **more: Any) -> Quantisation:
    return Quantisation("plain", Packing(*packing, **more))


OWN = {"own_numbers": True}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (BLOCKS, Quantisation("fp8_block")),
        (BLOCKS | {"fmt": "e4m3", "activation_scheme": "dynamic"}, Quantisation("fp8_block")),
        (BLOCKS | {"scale_fmt": "ue8m0"}, Quantisation("fp8_block")),  # DeepSeek-V3.1
        (BLOCKS | {"modules_to_not_convert": ["lm_head"]}, Quantisation("fp8_block")),
        (BLOCKS | {"dequantize": False, "kv_cache_scheme": None}, Quantisation("fp8_block")),
        (AUTO_GPTQ, int4("gptq", 4, 128, 1)),
        (
            GPTQ | {"desc_act": True, "sym": False},
            plain("gptq", 4, 128, 1, symmetric=False, in_order=False),
        ),
        (GPTQ | {"desc_act": True, "static_groups": True}, int4("gptq", 4, 128, 1)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
            plain("gptq", 8, 0),
        ),
        (GPTQ | {"bits": 3}, plain("gptq", 3, 128, 1)),
        (GPTQ | {"provider": "auto-round", "data_type": "int"}, int4("gptq", 4, 128, 1)),
        (GPTQMODEL | {"format": "gptq_v2"}, int4("gptq", 4, 128, 0)),
        (GPTQMODEL | {"dynamic": {"-:.*gate$": {}}}, int4("gptq", 4, 128, 1)),
        (
            GPTQMODEL | {"lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32}}},
            int4("gptq", 4, 128, 1, **OWN),
        ),
        (
            GPTQMODEL | {"dynamic": {"-:.*gate$": {}, "+:.*down": {"bits": 8}}},
            int4("gptq", 4, 128, 1, **OWN),
        ),
        (
            GPTQMODEL | {"dynamic": {"+:.*down": {"bits": 8, "sym": False}}},
            plain("gptq", 4, 128, 1, **OWN),
        ),
        (
            GPTQMODEL | {"dynamic": {"+:.*down": {"desc_act": True}}},
            plain("gptq", 4, 128, 1, **OWN),
        ),
        (AWQ | {"modules_to_not_convert": ["gate"]}, int4("awq", 4, 128, symmetric=False)),
        (GPTQMODEL_AWQ | {"zero_point": False}, int4("awq", 4, 128, symmetric=False)),
        (AUTO_ROUND, int4("gptq", 4, 64, 1)),
        (
            AUTO_ROUND | {"packing_format": "auto_round", "sym": False},
            int4("gptq", 4, 64, 0, symmetric=False),
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "bits": 2},
            plain("gptq", 2, 64, 0),
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            int4("awq", 4, 64, symmetric=False),
        ),
        (AUTO_ROUND | {"extra_config": {"mlp.gate": {"bits": 16}}}, int4("gptq", 4, 64, 1)),
        (KIMI, int4("packed", 4, 32)),
        (
            compressed("pack-quantized", W4A16 | {"actorder": "group"}),
            plain("packed", 4, 32, in_order=False),
        ),
        (
            compressed("pack-quantized", W4A16 | {"actorder": "dynamic"}),
            plain("packed", 4, 32, in_order=False),
        ),
        (compressed("pack-quantized", W4A16 | {"group_size": 16}), plain("packed", 4, 16)),
        (
            compressed("pack-quantized", W4A16 | {"symmetric": False, "group_size": 128}),
            int4("packed", 4, 128, symmetric=False),
        ),
        (compressed("pack-quantized", W8A16), plain("packed", 8, 0)),
        (INT8, Quantisation("int8", Packing("scaled", 8, 0))),
        (compressed("int-quantized", W8A8), plain("scaled", 8, 0)),
        (
            compressed("float-quantized", FP8, DYNAMIC | {"type": "float"}),
            Quantisation("fp8", Packing("scaled", 8, 0)),
        ),
        (
            compressed("float-quantized", FP8_BLOCKS),
            Quantisation("fp8_block", Packing("fp8_block", 8, 128)),
        ),
        (  # FP8 with scales of activations and of a cache
            compressed("float-quantized", FP8_TENSOR, FP8_TENSOR | {"dynamic": False}) | CACHE,
            Quantisation("fp8", Packing("scaled", 8, 0)),
        ),
        (  # a cache alone
            {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}} | CACHE,
            plain("scaled", 8, 0),
        ),
        (
            several(INT8, compressed("pack-quantized", W4A16 | {"group_size": 128}), KIMI),
            int4("packed", 4, 32, **OWN),
        ),
        (
            several(INT8, compressed("pack-quantized", W4A16 | {"group_size": 16})),
            Quantisation("int8", Packing("scaled", 8, 0, **OWN)),
        ),
        (  # no tensor says which rows are quantised
            several(INT8, compressed("int-quantized", W8A8)),
            plain("scaled", 8, 0, **OWN),
        ),
    ],
)
def test_released(section: dict[str, Any], expected: Quantisation):
    entries = Entries({})
    assert quantisation(section, entries) == expected
    assert entries.problems == []


@pytest.mark.parametrize("section", [None, {}])
def test_none(section: Any):
    assert stored_format(Entries({"quantization_config": section})) == "plain"


REFUSED = [
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    BLOCKS | {"weight_block_size": [64, 64]},
    {"quant_method": "fp8"},
    {"weight_block_size": [128, 128]},
    BLOCKS | {"fmt": "e5m2"},
    GPTQ | {"bits": 5},
    GPTQMODEL_AWQ | {"dynamic": {"-:.*gate$": {}, "+:.*down": {"group_size": 32}}},
    GPTQ | {"dynamic": {"+:.*down": {"format": "gguf"}}},
    GPTQ | {"rotation": "hadamard"},
    AUTO_ROUND | {"packing_format": "x"},
    AUTO_ROUND | {"packing_format": None},
    AUTO_ROUND | {"bits": 3, "act_bits": 8},
    AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}, "gate": {"bits": 16}}},
    AUTO_ROUND | {"static_kv_dtype": "fp8"},
    AWQ | {"version": "gemv"},
    compressed("nvfp4-pack-quantized", FP8),
    compressed("int-quantized", W8A8, DYNAMIC | {"dynamic": False}),
    compressed("int-quantized", W8A8 | {"symmetric": False}, DYNAMIC),
    KIMI | {"kv_cache_scheme": {"num_bits": 4}},
    KIMI | {"config_groups": {}},
    several(compressed("nvfp4-pack-quantized", FP8), KIMI),
]


def test_refused():
    """`golden/checkpoint/refused.json` has what is said of each."""
    told = []
    for section in REFUSED:
        entries = Entries({})
        quantisation(section, entries)
        assert entries.problems
        told.append(sorted(entries.problems))
    golden.check("checkpoint/refused.json", told)

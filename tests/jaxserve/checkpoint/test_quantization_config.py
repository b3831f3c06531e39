"""`quantization_config` of released files, and what is refused of it.

`test_golden.py` has whole sections as GPTQModel and LLM Compressor write them.
"""

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.quantization_config import quantisation, stored_format
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


RELEASED = [
    BLOCKS,
    BLOCKS | {"fmt": "e4m3", "activation_scheme": "dynamic"},
    BLOCKS | {"scale_fmt": "ue8m0"},  # DeepSeek-V3.1
    BLOCKS | {"modules_to_not_convert": ["lm_head"]},
    BLOCKS | {"dequantize": False, "kv_cache_scheme": None},
    AUTO_GPTQ,
    GPTQ | {"desc_act": True, "sym": False},
    GPTQ | {"desc_act": True, "static_groups": True},
    GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
    GPTQ | {"bits": 3},
    GPTQ | {"provider": "auto-round", "data_type": "int"},
    GPTQMODEL | {"format": "gptq_v2"},
    GPTQMODEL | {"dynamic": {"-:.*gate$": {}}},
    GPTQMODEL | {"lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32}}},
    GPTQMODEL | {"dynamic": {"-:.*gate$": {}, "+:.*down": {"bits": 8}}},
    GPTQMODEL | {"dynamic": {"+:.*down": {"bits": 8, "sym": False}}},
    GPTQMODEL | {"dynamic": {"+:.*down": {"desc_act": True}}},
    AWQ | {"modules_to_not_convert": ["gate"]},
    GPTQMODEL_AWQ | {"zero_point": False},
    AUTO_ROUND,
    AUTO_ROUND | {"packing_format": "auto_round", "sym": False},
    AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "bits": 2},
    AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
    AUTO_ROUND | {"extra_config": {"mlp.gate": {"bits": 16}}},
    KIMI,
    compressed("pack-quantized", W4A16 | {"actorder": "group"}),
    compressed("pack-quantized", W4A16 | {"actorder": "dynamic"}),
    compressed("pack-quantized", W4A16 | {"group_size": 16}),
    compressed("pack-quantized", W4A16 | {"symmetric": False, "group_size": 128}),
    compressed("pack-quantized", W8A16),
    INT8,
    compressed("int-quantized", W8A8),
    compressed("float-quantized", FP8, DYNAMIC | {"type": "float"}),
    compressed("float-quantized", FP8_BLOCKS),
    # Scales of activations and of a cache are left unread
    compressed("float-quantized", FP8_TENSOR, FP8_TENSOR | {"dynamic": False}) | CACHE,
    # A quantised cache alone
    {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}} | CACHE,
    several(INT8, compressed("pack-quantized", W4A16 | {"group_size": 128}), KIMI),
    several(INT8, compressed("pack-quantized", W4A16 | {"group_size": 16})),
    several(INT8, compressed("int-quantized", W8A8)),  # no tensor says whose rows are quantised
]


def test_released():
    """`golden/checkpoint/packings.txt` has how each section is read."""
    read = []
    for section in RELEASED:
        entries = Entries({})
        read.append(f"{section}\n    {quantisation(section, entries)}\n")
        assert entries.problems == []
    golden.check("checkpoint/packings.txt", "\n".join(read))


def test_none():
    for section in (None, {}):
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
    GPTQ | {"is_marlin_format": True},
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
    KIMI | {"sparsity_config": {"format": "sparse-24-bitmask"}},
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

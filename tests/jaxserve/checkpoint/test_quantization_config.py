"""`quantization_config` of released files, and what is refused of it."""

from typing import Any

import pytest

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.packed import Packing
from jaxserve.checkpoint.quantization_config import MADE, Quantisation, quantisation, stored_format
from tests.jaxserve.checkpoint.packed_folders import several

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": "gptqmodel:2.2.0"},
    "model_file_base_name": None,
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["gate"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQMODEL = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "format": "gptq",
    "group_size": 128,
    "lm_head": False,
    "meta": {"act_group_aware": True, "offload_to_disk": True, "quantizer": ["gptqmodel:7.0.0"]},
    "method": "gptq",
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
GPTQMODEL_AWQ = GPTQMODEL | {
    "checkpoint_format": "gemm",
    "format": "gemm",
    "method": "awq",
    "quant_method": "awq",
    "sym": None,
    "version": "gemm",
    "zero_point": True,
}
AUTO_ROUND = {
    "autoround_version": "0.16.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 64,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
TOKENS = WEIGHTS | {"dynamic": True, "group_size": None, "num_bits": 8, "strategy": "token"}


def compressed(
    format: str = "pack-quantized", inputs: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """Kimi K2 Thinking's, unless told otherwise."""
    return {
        "config_groups": {
            "group_0": {
                "input_activations": inputs,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": WEIGHTS | weights,
            }
        },
        "format": format,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.3",
    }


CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (BLOCKS, Quantisation("fp8_block")),
        (BLOCKS | {"fmt": "e4m3", "activation_scheme": "dynamic"}, Quantisation("fp8_block")),
        (BLOCKS | {"scale_fmt": "ue8m0"}, Quantisation("fp8_block")),  # DeepSeek-V3.1
        (BLOCKS | {"modules_to_not_convert": ["lm_head"]}, Quantisation("fp8_block")),
        (BLOCKS | {"dequantize": False, "kv_cache_scheme": None}, Quantisation("fp8_block")),
        (GPTQ, Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1))),
        (
            GPTQ | {"desc_act": True, "sym": False},
            Quantisation("plain", Packing("gptq", 4, 128, 1, symmetric=False, in_order=False)),
        ),
        (
            GPTQ | {"desc_act": True, "static_groups": True},
            Quantisation("int4", Packing("gptq", 4, 128, 1)),
        ),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
            Quantisation("plain", Packing("gptq", 8, 0)),
        ),
        (AWQ, Quantisation("int4", Packing("awq", 4, 128, symmetric=False))),
        (GPTQMODEL, Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1))),
        (
            GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": None},
            Quantisation("int4", Packing("gptq", 4, 128, zero_plus=0)),
        ),
        (
            GPTQMODEL | {"dynamic": {"-:.*self_attn.*": {}, "-:.*mlp\\.gate$": {}}},
            Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1)),
        ),
        (
            GPTQMODEL | {"lm_head": True, "dynamic": {"lm_head": {"bits": 8, "group_size": 32}}},
            Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1, own_numbers=True)),
        ),
        (
            GPTQMODEL | {"dynamic": {"-:.*gate$": {}, "+:.*down_proj": {"bits": 8}}},
            Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1, own_numbers=True)),
        ),
        (
            GPTQMODEL | {"dynamic": {"+:.*down_proj": {"bits": 8, "sym": False}}},
            Quantisation("plain", Packing("gptq", 4, 128, zero_plus=1, own_numbers=True)),
        ),
        (
            GPTQMODEL | {"dynamic": {"+:.*down_proj": {"desc_act": True}}},
            Quantisation("plain", Packing("gptq", 4, 128, zero_plus=1, own_numbers=True)),
        ),
        (GPTQ | {"bits": 3}, Quantisation("plain", Packing("gptq", 3, 128, zero_plus=1))),
        (
            GPTQMODEL_AWQ | {"zero_point": False},
            Quantisation("int4", Packing("awq", 4, 128, symmetric=False)),
        ),
        (
            GPTQMODEL_AWQ,
            Quantisation("int4", Packing("awq", 4, 128, symmetric=False)),
        ),
        (
            GPTQ | {"provider": "auto-round", "autoround_version": "0.16.1", "data_type": "int"},
            Quantisation("int4", Packing("gptq", 4, 128, zero_plus=1)),
        ),
        (AUTO_ROUND, Quantisation("int4", Packing("gptq", 4, 64, zero_plus=1))),
        (
            AUTO_ROUND | {"packing_format": "auto_round", "sym": False},
            Quantisation("int4", Packing("gptq", 4, 64, zero_plus=0, symmetric=False)),
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "bits": 2},
            Quantisation("plain", Packing("gptq", 2, 64, zero_plus=0)),
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            Quantisation("int4", Packing("awq", 4, 64, symmetric=False)),
        ),
        (
            AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16}}},
            Quantisation("int4", Packing("gptq", 4, 64, zero_plus=1)),
        ),
        (compressed(), Quantisation("int4", Packing("packed", 4, 32))),
        (
            compressed(actorder="group"),
            Quantisation("plain", Packing("packed", 4, 32, in_order=False)),
        ),
        (
            compressed(actorder="dynamic"),
            Quantisation("plain", Packing("packed", 4, 32, in_order=False)),
        ),
        (compressed(group_size=16), Quantisation("plain", Packing("packed", 4, 16))),
        (
            compressed("pack-quantized", symmetric=False, group_size=128),
            Quantisation("int4", Packing("packed", 4, 128, symmetric=False)),
        ),
        (
            compressed("pack-quantized", **CHANNEL),
            Quantisation("plain", Packing("packed", 8, 0)),
        ),
        (
            compressed("int-quantized", TOKENS, **CHANNEL),
            Quantisation("int8", Packing("scaled", 8, 0)),
        ),
        (
            compressed("int-quantized", **CHANNEL),
            Quantisation("plain", Packing("scaled", 8, 0)),
        ),
        (
            compressed("float-quantized", TOKENS | {"type": "float"}, **CHANNEL, type="float"),
            Quantisation("fp8", Packing("scaled", 8, 0)),
        ),
        (
            compressed(
                "float-quantized",
                **CHANNEL | {"strategy": "block", "block_structure": [128, 128]},
                type="float",
            ),
            Quantisation("fp8_block", Packing("fp8_block", 8, 128)),
        ),
        (  # FP8 with scales of activations and of a cache
            compressed(
                "float-quantized",
                TOKENS | {"type": "float", "dynamic": False, "strategy": "tensor"},
                **CHANNEL | {"strategy": "tensor"},
                type="float",
            )
            | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            Quantisation("fp8", Packing("scaled", 8, 0)),
        ),
        (  # a cache alone
            {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "config_groups": {},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            Quantisation("plain", Packing("scaled", 8, 0)),
        ),
        (
            several(
                compressed("int-quantized", TOKENS, **CHANNEL),
                compressed(group_size=128),
                compressed(),
            ),
            Quantisation("int4", Packing("packed", 4, 32, own_numbers=True)),
        ),
        (
            several(compressed("int-quantized", TOKENS, **CHANNEL), compressed(group_size=16)),
            Quantisation("int8", Packing("scaled", 8, 0, own_numbers=True)),
        ),
        (  # whose rows are quantised and whose are not, no tensor says
            several(
                compressed("int-quantized", TOKENS, **CHANNEL),
                compressed("int-quantized", **CHANNEL),
            ),
            Quantisation("plain", Packing("scaled", 8, 0, own_numbers=True)),
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


GROUP = "quantization_config.config_groups.group_0"


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            [
                "quantization_config.quant_method = 'bitsandbytes' is not supported, only 'fp8' or "
                "'compressed-tensors' or 'gptq' or 'awq' or 'auto-round'"
            ],
        ),
        (
            BLOCKS | {"weight_block_size": [64, 64]},
            ["quantization_config.weight_block_size = [64, 64] is not supported, only [128, 128]"],
        ),
        (
            {"quant_method": "fp8", "weight_block_size": None},
            ["quantization_config.weight_block_size is missing"],
        ),
        ({"weight_block_size": [128, 128]}, ["quantization_config.quant_method is missing"]),
        (
            BLOCKS | {"fmt": "e5m2"},
            ["quantization_config.fmt = 'e5m2' is not supported, only 'e4m3'"],
        ),
        (
            GPTQ | {"bits": 5},
            ["quantization_config.bits = 5 is not supported, only 4 or 8 or 2 or 3"],
        ),
        (
            GPTQMODEL_AWQ | {"dynamic": {"-:.*gate$": {}, "+:.*down_proj": {"group_size": 32}}},
            [
                "quantization_config.dynamic has modules with bits or groups of their own, which "
                "is not supported: +:.*down_proj"
            ],
        ),
        (
            GPTQ | {"dynamic": {"+:.*down_proj": {"format": "gguf"}}},
            [
                "quantization_config.dynamic.+:.*down_proj = {'format': 'gguf'} is not supported, "
                f"only {', '.join(MADE)}"
            ],
        ),
        (
            GPTQ | {"rotation": "hadamard"},
            [
                "quantization_config.rotation = 'hadamard' is not known, and might change what the "
                "model computes"
            ],
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
            [
                "quantization_config.packing_format = 'auto_round:llm_compressor' is not "
                "supported, only 'auto_round:auto_gptq' or 'auto_round:gptq' or 'auto_round' or "
                "'auto_round:gptqmodel' or 'auto_round:auto_awq' or 'auto_round:awq'"
            ],
        ),
        (
            {**AUTO_ROUND, "packing_format": None},
            ["quantization_config.packing_format is missing"],
        ),
        (
            AUTO_ROUND | {"bits": 3, "act_bits": 8},
            [
                "quantization_config.bits = 3 is not supported, only 4 or 8 or 2",
                "quantization_config.act_bits = 8 is not supported, only 16 or 32",
            ],
        ),
        (
            AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}, "gate": {"bits": 16}}},
            [
                "quantization_config.extra_config has modules with bits or groups of their own, "
                "which is not supported: lm_head"
            ],
        ),
        (
            AUTO_ROUND | {"static_kv_dtype": "fp8"},
            [
                "quantization_config.static_kv_dtype = 'fp8' is not known, and might change what "
                "the model computes"
            ],
        ),
        (
            AWQ | {"version": "gemv"},
            ["quantization_config.version = 'gemv' is not supported, only 'gemm' or 'GEMM'"],
        ),
        (
            compressed("nvfp4-pack-quantized", type="float"),
            [
                "quantization_config.format = 'nvfp4-pack-quantized' is not supported, only "
                "'int-quantized' or 'float-quantized' or 'naive-quantized' or 'pack-quantized'",
            ],
        ),
        (
            compressed("int-quantized", TOKENS | {"dynamic": False}, **CHANNEL),
            [f"{GROUP}.input_activations.dynamic = False is not supported, only True"],
        ),
        (
            compressed("int-quantized", TOKENS, **CHANNEL | {"symmetric": False}),
            [f"{GROUP}.weights.symmetric = False is not supported, only True"],
        ),
        (
            compressed() | {"kv_cache_scheme": {"num_bits": 4}},
            ["quantization_config.kv_cache_scheme.num_bits = 4, expected 8"],
        ),
        (
            compressed() | {"config_groups": {}},
            ["quantization_config.config_groups has no groups"],
        ),
        (
            several(compressed("nvfp4-pack-quantized"), compressed()),
            [
                f"{GROUP}.format = 'nvfp4-pack-quantized' is not supported, only "
                "'int-quantized' or 'float-quantized' or 'naive-quantized' or 'pack-quantized'"
            ],
        ),
    ],
)
def test_others(section: dict[str, Any], problems: list[str]):
    entries = Entries({})
    quantisation(section, entries)
    assert sorted(entries.problems) == sorted(problems)

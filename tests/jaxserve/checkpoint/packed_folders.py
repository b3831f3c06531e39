"""Folders in the Hub's quantised formats, packed by their libraries' descriptions."""

from typing import Any

import numpy as np
import yaml

from tests import golden
from tests.jaxserve.checkpoint.opened import changed, edit_config
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import TinyQwen3

GROUP = 32
SIZES = TinyQwen3(model_type="qwen3_moe", hidden_size=64, moe_intermediate_size=64)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes: list[int], bits: int) -> np.int32:
    """Low bits first."""
    total = 0
    for place, code in enumerate(codes):
        total |= int(code) << (place * bits)
    return np.uint32(total).astype(np.int32)


def pack_rows(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """[rows, columns] -> [rows, columns / n]."""
    n = 32 // bits
    order = order or list(range(n))
    return np.array(
        [
            [words([row[start + c] for c in order], bits) for start in range(0, len(row), n)]
            for row in codes
        ],
        np.int32,
    )


class Packer:
    """Makes random codes of every projection: tensors, and the matrix that they stand for."""

    def __init__(self, bits: int = 4, group: int = GROUP, seed: int = 0):
        self.bits, self.group, self.rng = bits, group, np.random.default_rng(seed)

    def parts(self, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes [out, in], zero points and scales [out, groups]."""
        groups = shape[1] // self.group if self.group else 1
        top = 1 << self.bits
        scales = self.rng.uniform(0.01, 0.03, (shape[0], groups)).astype(np.float16)
        return (
            self.rng.integers(0, top, shape),
            self.rng.integers(0, top, (shape[0], groups)),
            scales,
        )

    def matrix(self, codes, zeros, scales, of=None):
        """In float64, weight by weight."""
        made = np.zeros(codes.shape)
        for column in range(codes.shape[1]):
            group = of[column] if of is not None else column // (self.group or codes.shape[1])
            made[:, column] = (codes[:, column] - zeros[:, group]) * scales[:, group]
        return made

    def gptq(self, base, shape, *, shuffled=False, plus=1):
        codes, zeros, scales = self.parts(shape)
        of = self.rng.permutation(np.arange(shape[1]) // self.group) if shuffled else None
        index = np.arange(shape[1]) // self.group if of is None else of
        stored = (zeros - plus) % (1 << self.bits)
        tensors = {
            f"{base}qweight": pack_rows(codes, self.bits).T,
            f"{base}qzeros": pack_rows(stored.T, self.bits),
            f"{base}scales": scales.T,
            f"{base}g_idx": index.astype(np.int32),
        }
        return tensors, self.matrix(codes, zeros, scales, of)

    def awq(self, base, shape):
        codes, zeros, scales = self.parts(shape)
        tensors = {
            f"{base}qweight": pack_rows(codes.T, 4, AWQ_ORDER),
            f"{base}qzeros": pack_rows(zeros.T, 4, AWQ_ORDER),
            f"{base}scales": scales.T,
        }
        return tensors, self.matrix(codes, zeros, scales)

    def compressed(self, base, shape):
        codes, zeros, scales = self.parts(shape)
        zeros = np.full_like(zeros, 1 << (self.bits - 1))
        tensors = {
            f"{base}weight_packed": pack_rows(codes, self.bits),
            f"{base}weight_scale": scales,
            f"{base}weight_shape": np.array(shape),
        }
        return tensors, self.matrix(codes, zeros, scales)

    def channels(self, base, shape, *, dtype=np.int8, one=None):
        """A scale a channel, or `one` of this shape for the whole matrix."""
        scales = self.rng.uniform(0.001, 0.003, one or (shape[0], 1)).astype(np.float32)
        values = self.rng.integers(-127, 128, shape).astype(dtype)
        tensors = {f"{base}weight": values, f"{base}weight_scale": scales}
        return tensors, values.astype(np.float64) * scales


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}


def without_index(parts, matrix):
    """AutoRound writes no g_idx."""
    return {name: part for name, part in parts.items() if not name.endswith("g_idx")}, matrix


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None):
    """The section that LLM Compressor writes."""
    section = yaml.safe_load(golden.text("checkpoint/compressed_section.yaml"))
    group = section["config_groups"]["group_0"]
    group |= {"input_activations": inputs, "weights": group["weights"] | weights}
    return section | {"format": format}


DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"}
W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
W8A16 = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}
W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def several(*sections: dict[str, Any]) -> dict[str, Any]:
    """The section of a folder that has the groups of these, each with its format."""
    groups = [each["config_groups"]["group_0"] | {"format": each["format"]} for each in sections]
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return sections[0] | {"format": "mixed-precision", "config_groups": named}


def write(folder, section, pack):
    """A tiny model whose projections `pack` makes; returns the matrices they stand for by name."""
    TinyModel("packed", SIZES).write(folder)
    stand_for = {}
    with changed(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            shape = tensors.pop(name).shape
            parts, stand_for[name] = pack(name.removesuffix("weight"), shape)
            tensors |= {part: np.ascontiguousarray(values) for part, values in parts.items()}
    edit_config(folder, quantization_config=section)
    return stand_for


FORMATS = {
    "gptq": (GPTQ, lambda *a: Packer().gptq(*a)),
    "gptq shuffled": (GPTQ, lambda *a: Packer().gptq(*a, shuffled=True)),
    "awq": (AWQ, lambda *a: Packer().awq(*a)),
    "auto-round gptq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"},
        lambda *a: without_index(*Packer().gptq(*a)),
    ),
    "auto-round": (
        AUTO_ROUND | {"packing_format": "auto_round"},
        lambda *a: without_index(*Packer().gptq(*a, plus=0)),
    ),
    "auto-round awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        lambda *a: Packer().awq(*a),
    ),
    "w4a16": (compressed("pack-quantized", W4A16), lambda *a: Packer().compressed(*a)),
    "w8a16": (
        compressed("pack-quantized", W8A16),
        lambda *a: Packer(bits=8, group=64).compressed(*a),
    ),
    "w8a8": (compressed("int-quantized", W8A8, DYNAMIC), lambda *a: Packer().channels(*a)),
}

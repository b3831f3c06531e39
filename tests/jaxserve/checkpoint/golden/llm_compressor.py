"""Makes `llm_compressor.npz` and `.json`: LLM Compressor's folders, a matrix of each.

    OMP_NUM_THREADS=1 python tests/jaxserve/checkpoint/golden/llm_compressor.py

Made with llmcompressor 0.14.0.1, compressed-tensors 0.19.0, transformers 5.17.0 and torch 2.9.1 on
a CPU (2026-11-23); no test imports it. Of a random Qwen3 of one layer each scheme below gives a
folder; kept are the parts of `k_proj` (of two schemes in one folder: of `gate_proj`, too), the
folder's `quantization_config`, and what compressed-tensors dequantises the parts to, with its
scales in FP32.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def packed(targets: str = "Linear", **weights: Any) -> dict[str, Any]:
    """A scheme of groups of 32 columns."""
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"targets": [targets], "weights": given | weights}


def one(scheme: str | dict[str, Any], **more: Any) -> list[Any]:
    """The recipe of one scheme for all matrices but the head."""
    given = {"config_groups": {"group_0": scheme}}
    if isinstance(scheme, str):
        given = {"targets": "Linear", "scheme": scheme}
    return [QuantizationModifier(ignore=["lm_head"], **given, **more)]


CHANNEL = packed("re:.*mlp.*", num_bits=8, strategy="channel", group_size=None)
MIXED = {"group_0": packed("re:.*self_attn.*"), "group_1": CHANNEL | {"input_activations": TOKENS}}
RECIPES = {
    "w8a8": lambda: one("W8A8"),
    "fp8": lambda: one("FP8"),
    "fp8 dynamic": lambda: one("FP8_DYNAMIC", kv_cache_scheme=CACHE),
    "fp8 block": lambda: one("FP8_BLOCK"),
    "w2a16": lambda: one(packed(num_bits=2)),
    "w4a16": lambda: one(packed()),
    "w4a16 asymmetric": lambda: one(packed(symmetric=False)),
    "w8a16": lambda: one(packed(num_bits=8)),
    "gptq actorder": lambda: [
        GPTQModifier(config_groups={"group_0": packed(actorder="static")}, ignore=["lm_head"])
    ],
    "awq": lambda: [AWQModifier(duo_scaling=False), *one(packed(symmetric=False))],
    "mixed": lambda: [QuantizationModifier(config_groups=MIXED, ignore=["lm_head"])],
    "nvfp4": lambda: one("NVFP4"),
    "mxfp4": lambda: one("MXFP4"),
    "mxfp8": lambda: one("MXFP8"),
    "w3a16": lambda: one(packed(num_bits=3)),
    "w4a8": lambda: one("W4A8"),
    "w4afp8": lambda: one("W4AFP8"),
}
REFUSED = ("nvfp4", "mxfp4", "mxfp8", "w3a16", "w4a8", "w4afp8")
PARTS = ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate_proj")


def made(name: str, folder: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    wide = name == "fp8 block" or name in REFUSED
    sizes = Qwen3Config(
        vocab_size=256,
        hidden_size=256 if wide else 64,
        num_hidden_layers=1,
        num_attention_heads=8 if wide else 2,
        # AWQ's scales of values go into the output only where they are as many.
        num_key_value_heads=2 if name == "awq" else 1,
        head_dim=16 if wide else 32,
        intermediate_size=128 if wide else 32,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(sizes).to(torch.bfloat16).save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def main() -> None:
    torch.Tensor.pin_memory = lambda self, *_: self  # AWQ's cache asks for it without a GPU, too
    random.seed(1)
    rows = [[random.randrange(3, 256) for _ in range(64)] for _ in range(16)]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w2")
    arrays: dict[str, np.ndarray] = {}
    sections = {}
    for name, recipe in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 64] * 16})
            source, target = Path(folder, "source"), Path(folder, "target")
            given = {"recipe": recipe(), "output_dir": str(target), "max_seq_length": 64}
            model = made(name, source)
            oneshot(model=model, processor=tokenizer, dataset=data, log_dir=None, **given)
            config = json.loads((target / "config.json").read_text())
            files = load_file(target / "model.safetensors")
        sections[name] = config["quantization_config"]
        if name in REFUSED:
            continue
        groups = sections[name]["config_groups"].values()
        for module, group in zip(PARTS, groups, strict=False):
            parts = {n.rpartition(".")[2]: t for n, t in files.items() if module in n}
            scheme = QuantizationScheme.model_validate(group)
            own = {n: t.float() if n == "weight_scale" else t for n, t in parts.items()}
            dense = BaseCompressor.get_value_from_registry(group["format"]).decompress(own, scheme)
            assert dense["weight"].dtype == torch.float32
            key = f"{name}/{module.rpartition('.')[2]}"
            arrays[f"{key}/expected"] = dense["weight"].numpy()
            for part, tensor in parts.items():
                kinds = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
                arrays[f"{key}/{part}"] = tensor.view(kinds.get(tensor.dtype, tensor.dtype)).numpy()
    np.savez_compressed(HERE / "llm_compressor.npz", **arrays)
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sections.items()]
    (HERE / "llm_compressor.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()

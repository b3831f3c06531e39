"""Tiny random checkpoints of all families but Step-3, in the layout of the released files.

`catalogue.py` lists the models, `make_golden.py` runs transformers on them, and
`tests/jaxserve/test_parity.py` jaxserve. Knows NumPy and safetensors only. Step-3, for which
transformers has no class, has `tiny_step3.py` and `step3_numpy.py` instead.

The weights are large enough for the routing to spread and the norms and biases to matter: what a
library draws at initialisation would hide a wrong router or a forgotten norm. They are made of a
generator's raw bits by exact arithmetic, so that they are the same on every machine and with every
version of NumPy.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.reference.block_fp8 import BLOCK, block_quantise
from tests.reference.tiny_sizes import (
    BOS,
    EOS,
    VOCAB,
    Spelling,
    TinyDeepseek,
    TinyGptOss,
    TinyQwen3,
    TinyStep3p5,
)


@dataclass(frozen=True)
class TinyModel:
    """One entry of the catalogue."""

    name: str
    sizes: TinyDeepseek | TinyQwen3 | TinyStep3p5 | TinyGptOss
    seed: int = 0
    """Seed of the weights, with which no choice of the reference is a close one."""
    spelling: Spelling = "released"
    fp8_blocks: bool = False
    """The projections are stored in FP8 with a scale for every block of 128 × 128."""
    sigma: float = 0.15
    """Standard deviation of matrices and biases. In wider models 0.15 makes scores so large that
    the rounding of FP32 shows."""

    def config(self, *, dequantised: bool = False) -> dict[str, Any]:
        """The content of config.json."""
        entries = self.sizes.config(self.spelling)
        stored = "bfloat16" if self.fp8_blocks and not dequantised else "float32"
        if self.spelling == "released":
            entries |= {"torch_dtype": stored, "transformers_version": "4.51.0"}
        else:
            entries |= {"dtype": stored, "transformers_version": "5.23.0"}
        if self.fp8_blocks and not dequantised:
            entries["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": list(BLOCK),
            }
        return dict(sorted(entries.items()))

    def tensors(self) -> dict[str, np.ndarray]:
        """Random float32 weights: σ `sigma`, a router's bias σ 0.3, norms 1 ± 0.2, or ± 0.2 where
        1 is added to them."""
        raw = np.random.PCG64(self.seed)
        tensors: dict[str, np.ndarray] = {}
        for name, shape in self.sizes.shapes().items():
            if "norm.weight" in name:
                least = -0.2 if isinstance(self.sizes, TinyStep3p5) else 0.8
                tensor = least + 0.4 * _uniform(raw, shape)
            elif name.endswith(("e_score_correction_bias", "router_bias")):
                tensor = 0.3 * _normal(raw, shape)
            else:
                tensor = self.sigma * _normal(raw, shape)
            tensors[name] = tensor.astype(np.float32)
        return with_copies(tensors)

    def write(self, folder: str | Path, *, shards: int = 1, dequantised: bool = False) -> Path:
        """Writes config.json, safetensors and a tokenizer.json; returns the folder.

        Args:
          folder: is created if it does not exist.
          shards: the number of files; if more than one, there is an index too.
          dequantised: write FP8 entries as the FP32 values that they stand for.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config(dequantised=dequantised)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(), indent=2) + "\n")
        tensors = self.tensors()
        if self.fp8_blocks:
            tensors = block_quantise(tensors, dequantised=dequantised)
        write_safetensors(folder, tensors, shards)
        return folder

    def digest(self) -> str:
        """Changes whenever config or weights change (golden files belong to one digest)."""
        entries = {k: v for k, v in self.config().items() if k != "transformers_version"}
        hasher = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors().items()):
            hasher.update(f"{name} {tensor.shape} ".encode())
            hasher.update(tensor.astype("<f4").tobytes())
        return hasher.hexdigest()[:16]


def with_copies(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, in which modules of multi-token prediction repeat embedding and head."""
    for copy, original in (
        (".embed_tokens.weight", "model.embed_tokens.weight"),
        (".shared_head.head.weight", "lm_head.weight"),
    ):
        for name in tensors:
            if name.startswith("model.layers.") and name.endswith(copy):
                tensors[name] = tensors[original].copy()
    return tensors


def _normal(raw: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal with variance 1: sums of twelve 16-bit uniform numbers, without rounding."""
    size = int(np.prod(shape))
    words = raw.random_raw(3 * size).astype("<u8").view("<u2").reshape(size, 12)
    return (words.sum(axis=1, dtype=np.int64) * 2 - 12 * 0xFFFF).reshape(shape) / 2.0**17


def _uniform(raw: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform in [0, 1), 32 bits a number."""
    size = int(np.prod(shape))
    return (raw.random_raw(size) >> np.uint64(32)).reshape(shape) / 2.0**32


def write_safetensors(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    """Writes one file, or several with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are "<s>", "</s>" and the words "2", "3", …"""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    specials = [
        {"id": token, "content": content, "special": True, **plain}
        for token, content in ((BOS, "<s>"), (EOS, "</s>"))
    ]
    words = {"<s>": BOS, "</s>": EOS} | {str(token): token for token in range(2, VOCAB)}
    return {
        "version": "1.0",
        "added_tokens": specials,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "2"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }


PROMPT_LENGTHS = (1, 9, 37)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of ordinary tokens."""
    raw = np.random.PCG64(1000 + seed)
    return [(2 + raw.random_raw(n) % np.uint64(VOCAB - 2)).tolist() for n in lengths]

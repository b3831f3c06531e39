"""A tiny Qwen3-Next in the layout of the released files, and what transformers computes of it.

    python -m tests.reference.tiny_qwen3_next

writes `golden/qwen3_next.safetensors` (needs torch and transformers, as `make_golden.py` does):

    tokens  int32 [prompts, OUTPUT_TOKENS]   the greedy continuations
    logits  float32 [rows, vocab]            after every `EVERY`th token, prompts included

It is no part of the catalogue: its prompts are longer than the 64 tokens that the chunked form of
Gated DeltaNet takes at a time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from tests.reference.tiny_models import TinyModel, prompts
from tests.reference.tiny_sizes import VOCAB, Shapes, Spelling, prefixed

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER / "golden" / "qwen3_next.safetensors"
ENTRIES = yaml.safe_load((FOLDER.parent / "golden/reference/qwen3_next.yaml").read_text())
LENGTHS, OUTPUT_TOKENS, EVERY = (3, 64, 150), 24, 7


@dataclass(frozen=True)
class TinyQwen3Next:
    """The sizes are those of `ENTRIES`."""

    model_type: str = "qwen3_next"
    num_hidden_layers: int = 5

    def is_moe(self, layer: int) -> bool:
        """False: `make_golden.py` does not look at margins of its routers."""
        return False

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype."""
        return ENTRIES["config"] | {"vocab_size": VOCAB}

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape."""
        parts = ENTRIES["shapes"]
        named = dict(parts["model"])
        for layer in range(self.num_hidden_layers):
            own = parts["layer"] | parts["linear" if (layer + 1) % 4 else "full"]
            for part in ("shared_expert", *(f"experts.{number}" for number in range(8))):
                own |= prefixed(f"mlp.{part}.", parts["ffn"])
            named |= prefixed(f"model.layers.{layer}.", own)
        return {name: tuple(shape) for name, shape in named.items()}


@dataclass(frozen=True)
class TinyNext(TinyModel):
    """The model; its norms multiply by 1 + weight, but for those of linear attention."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights as `TinyModel.tensors` has them, with larger taps, decays and steps."""
        tensors = super().tensors()
        for name, tensor in tensors.items():
            if "norm.weight" in name and "linear_attn" not in name:
                tensor -= 1
            elif name.endswith(("conv1d.weight", "A_log", "dt_bias")):
                tensor *= 4
        return tensors


QWEN3_NEXT = TinyNext("qwen3_next", TinyQwen3Next(), sigma=0.1)  # type: ignore[arg-type]


def questions() -> list[list[int]]:
    """The prompts."""
    return prompts(LENGTHS)


def golden() -> tuple[list[list[int]], list[np.ndarray]]:
    """The continuations, and the recorded rows of logits, prompt by prompt."""
    made = load_file(GOLDEN)
    counts = [-(-(length + OUTPUT_TOKENS) // EVERY) for length in LENGTHS]
    return made["tokens"].tolist(), np.split(made["logits"], np.cumsum(counts)[:-1])


def main() -> None:
    """Runs transformers."""
    from tests.reference.make_golden import CLOSE_LOGITS, run_transformers

    made = run_transformers(QWEN3_NEXT, questions())
    assert made.varied, "take another seed"
    assert made.logit_margin > CLOSE_LOGITS
    rows = np.concatenate([logits[::EVERY] for logits in made.logits]).astype(np.float32)
    save_file({"tokens": np.asarray(made.tokens, np.int32), "logits": rows}, GOLDEN)


if __name__ == "__main__":
    main()

"""A tiny Qwen3-Next and a tiny Qwen3.5 in the layout of the released files, and what transformers
computes of them.

    python -m tests.reference.tiny_qwen3_next

writes their golden files (`long_prompts.py`).

They are no part of the catalogue: their prompts are longer than the 64 tokens that the chunked form
of Gated DeltaNet takes at a time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from tests import golden
from tests.reference.long_prompts import LongPrompts
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import Shapes, Spelling, prefixed

ENTRIES = yaml.safe_load(golden.text("reference/qwen3_next.yaml"))


@dataclass(frozen=True)
class TinyQwen3Next:
    """The sizes are those of `ENTRIES`."""

    model_type: str = "qwen3_next"
    num_hidden_layers: int = 4
    module: bool = False

    def is_moe(self, layer: int) -> bool:
        """False: `make_golden.py` does not look at margins of its routers."""
        return False

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype."""
        return dict(ENTRIES["config"][self.model_type])

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape."""
        parts = ENTRIES["shapes"][self.model_type]
        named = dict(parts["model"])
        layers = [f"{parts['prefix']}{layer}." for layer in range(self.num_hidden_layers)]
        for layer, prefix in enumerate(layers + ["mtp.layers.0."] * self.module):
            own = parts["layer"] | parts["linear" if layer < 3 else "full"]
            for part in parts["ffns"]:
                own |= prefixed(f"mlp.{part}.", parts["ffn"])
            named |= prefixed(prefix, own)
        named |= ENTRIES["module"] if self.module else {}
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


QWEN3_NEXT = TinyNext("qwen3_next", TinyQwen3Next(), sigma=0.1)
LONG = LongPrompts(QWEN3_NEXT, (3, 64, 150))
QWEN3_5_FP8 = TinyNext("qwen3_5_fp8", TinyQwen3Next("qwen3_5_fp8"), sigma=0.1, fp8_blocks=True)
QWEN3_5 = TinyNext("qwen3_5", TinyQwen3Next("qwen3_5_moe"), sigma=0.1)
LONG_3_5 = LongPrompts(QWEN3_5, LONG.lengths)
RECORDED = [LONG, LONG_3_5]

if __name__ == "__main__":
    for results in RECORDED:
        results.record()

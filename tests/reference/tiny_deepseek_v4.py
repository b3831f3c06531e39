"""A tiny DeepSeek-V4 as transformers 5 writes it, and what transformers computes of it.

    python -m tests.reference.tiny_deepseek_v4

writes its golden file (`long_prompts.py`).

It is no part of the catalogue: its prompts are longer than its windows, of which the largest row
stands for 32 tokens. 16 heads of the indexer make ties of their scores unlikely.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from tests import golden
from tests.reference.long_prompts import LongPrompts
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import VOCAB, Shapes, Spelling, prefixed

ENTRIES = yaml.safe_load(golden.text("reference/deepseek_v4.yaml"))


@dataclass(frozen=True)
class TinyDeepseekV4:
    """The sizes are the entries of `ENTRIES`, by the spelling of config.json."""

    model_type: str = "deepseek_v4"
    num_hidden_layers: int = 4
    changed: tuple[tuple[str, int], ...] = ()
    """Entries with other values."""
    module: bool = False
    """Whether the file has the prediction module, which transformers leaves out."""

    def is_moe(self, layer: int) -> bool:
        """False: `make_golden.py` does not know the scores of its routers."""
        return False

    def config(self, spelling: Spelling = "released") -> dict[str, Any]:
        """The content of config.json, but for the dtype."""
        return ENTRIES["both"] | ENTRIES[spelling] | {"vocab_size": VOCAB} | dict(self.changed)

    def shapes(self) -> Shapes:
        """Name in the checkpoint -> shape."""
        own, parts = self.config("transformers 5"), ENTRIES["shapes"]
        named = dict(parts["model"])
        experts = (
            *(f"experts.{number}" for number in range(own["n_routed_experts"])),
            "shared_experts",
        )
        kinds = [*zip(own["mlp_layer_types"], own["layer_types"], strict=True)]
        layers = [(f"model.layers.{layer}.", *kind) for layer, kind in enumerate(kinds)]
        layers += [("mtp.0.", "moe", "module")] * self.module
        for prefix, ffn, attention in layers:
            of_layer = parts["layer"] | parts[ffn] | parts["mixers"] | parts[attention]
            for part in experts:
                of_layer |= prefixed(f"ffn.{part}.", parts["ffn"])
            named |= prefixed(prefix, of_layer)

        def size(product: str | int) -> int:
            factors = str(product).split("*")
            return math.prod(int(own.get(factor, factor)) for factor in factors)

        return {name: tuple(map(size, shape)) for name, shape in named.items()}


@dataclass(frozen=True)
class TinyV4(TinyModel):
    """The model; the experts of a token id are different ones."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights as `TinyModel.tensors` has them, and tables of experts."""
        tensors = super().tensors()
        for name in [name for name in tensors if name.endswith("tid2eid")]:
            order = np.argsort(np.random.default_rng(self.seed).random((VOCAB, 8)), axis=1)
            tensors[name] = order[:, : tensors[name].shape[1]].astype(np.int64)
        return tensors


DEEPSEEK_V4 = TinyV4("deepseek_v4", TinyDeepseekV4(), spelling="transformers 5", sigma=0.2)
LONG = LongPrompts(DEEPSEEK_V4, (3, 47, 150))
RECORDED = [LONG]
WITH_MODULE = replace(DEEPSEEK_V4, sizes=TinyDeepseekV4(module=True))

if __name__ == "__main__":
    LONG.record()

"""Results of transformers for models that want longer prompts than those of the catalogue.

A module of such a model, run by its name, writes `golden/NAME.safetensors` (needs torch and
transformers, as `make_golden.py` does):

    tokens  int32 [prompts, OUTPUT_TOKENS]   the greedy continuations
    logits  float32 [rows, vocab]            after every `EVERY`th token, prompts included
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.reference.tiny_models import TinyModel, prompts

OUTPUT_TOKENS, EVERY = 24, 7


@dataclass(frozen=True)
class LongPrompts:
    """A model, and the lengths of its prompts."""

    model: TinyModel
    lengths: tuple[int, ...]

    @property
    def file(self) -> Path:
        """The recorded results."""
        return Path(__file__).parent / "golden" / f"{self.model.name}.safetensors"

    def questions(self) -> list[list[int]]:
        """The prompts."""
        return prompts(self.lengths)

    def golden(self) -> tuple[list[list[int]], list[np.ndarray]]:
        """The continuations, and the recorded rows of logits, prompt by prompt."""
        made = load_file(self.file)
        counts = [-(-(length + OUTPUT_TOKENS) // EVERY) for length in self.lengths]
        return made["tokens"].tolist(), np.split(made["logits"], np.cumsum(counts)[:-1])

    def record(self) -> None:
        """Runs transformers."""
        from tests.reference.make_golden import CLOSE_LOGITS, run_transformers

        made = run_transformers(self.model, self.questions())
        assert made.varied, "take another seed"
        assert made.logit_margin > CLOSE_LOGITS
        rows = np.concatenate([logits[::EVERY] for logits in made.logits]).astype(np.float32)
        save_file({"tokens": np.asarray(made.tokens, np.int32), "logits": rows}, self.file)

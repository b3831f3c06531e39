"""The architecture of a model, in the project's words, whatever the checkpoint calls things.

`checkpoint/hf.py` reads a family's config.json into a `ModelConfig`; everything above works from it
and never asks for a model's name.
"""

from typing import Literal

import msgspec

LayerKind = Literal["dense", "moe"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder with MFA attention (Step-3 §2) and dense or mixture-of-experts layers."""

    vocab: int
    d_model: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    latent: int
    """Width of the low-rank query (share_q_dim)."""
    d_ff: int
    """Hidden width of a dense layer."""
    moe_layers: frozenset[int]
    experts: int = 0
    top_k: int = 0
    expert_d_ff: int = 0
    shared_d_ff: int = 0
    """Hidden width of the shared expert; 0: none."""
    renormalise: bool = False
    """Whether the chosen experts' probabilities are divided by their sum."""
    rope_theta: float
    norm_epsilon: float
    max_positions: int
    tied_head: bool = False
    mtp_layers: int = 0
    """Multi-token-prediction modules in the checkpoint (kept for speculative decoding)."""

    def kind(self, layer: int) -> LayerKind:
        """Whether `layer` has routed experts."""
        return "moe" if layer in self.moe_layers else "dense"

    def runs(self) -> list[tuple[LayerKind, int, int]]:
        """Maximal runs of equal layers as (kind, first layer, one past the last)."""
        runs: list[tuple[LayerKind, int, int]] = []
        for layer in range(self.layers):
            kind = self.kind(layer)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1], layer + 1)
            else:
                runs.append((kind, layer, layer + 1))
        return runs

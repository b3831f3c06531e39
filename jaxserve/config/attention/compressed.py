"""Compressed attention: its sizes, and its answers (`config.model.Attention`)."""

import msgspec

from jaxserve.config.model import Attention, Indexer, Rope


class Compressed(
    Attention, msgspec.Struct, frozen=True, tag="compressed", forbid_unknown_fields=True
):
    """Attention to the rows of the last tokens and to rows that stand for several tokens each
    (DeepSeek-V4 §2.3). A row is key and value at once; every head has a sink."""

    computed_by = "jaxserve.model.attention.compressed:CompressedAttention"
    floats_alone = True

    q_heads: int
    q_latent: int
    """Width of the low-rank query."""
    head_dim: int
    """Width of a row, of which the last columns are rotated."""
    rope_dim: int
    out_groups: int
    """Groups of heads, each with a low-rank output of its own."""
    out_latent: int
    """Width of a group's low-rank output."""
    rope: Rope
    window: int
    """Tokens whose own rows a token attends to, itself included."""
    every: int = 0
    indexer: Indexer | None = None
    """Chooses the compressed rows that a token attends to; each is made of the tokens of the row
    before, too. None: a token attends to all, each made of its own tokens alone."""

    @property
    def divided(self) -> dict[str, int]:
        return {"query heads": self.q_heads, "o_groups": self.out_groups}

    @property
    def rotated(self) -> int:
        return self.rope_dim

    @property
    def rows_a_token(self) -> float:
        return 1 / self.every if self.every else 0.0

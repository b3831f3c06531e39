"""Multi-head latent attention: its sizes, and its answers (`config.model.Attention`)."""

import math

import msgspec

from jaxserve.config.model import Attention, Expansion, Indexer, Rope


class MLA(Attention, msgspec.Struct, frozen=True, tag="mla", forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2 §2.1)."""

    computed_by = "jaxserve.model.attention.mla:LatentAttention"
    splits_rows = True

    q_heads: int
    q_latent: int
    """Width of the low-rank query; 0: the query has one matrix."""
    kv_latent: int
    nope_dim: int
    """Dimensions of a head that are not rotated."""
    rope_dim: int
    v_dim: int
    scale: float
    """Softmax scale of the scores, YaRN's factor included."""
    rope: Rope
    bias: bool = False
    """Whether the down projections of query and latent, and the output projection, have a bias."""
    latent_epsilon: float = 1e-6
    """Epsilon of the norms of the query latent and the KV latent."""
    indexer: Indexer | None = None

    @property
    def rotated(self) -> int:
        return self.rope_dim

    @property
    def pair_flops(self) -> float:
        """Values are latents without their rotated part."""
        return 2.0 * self.q_heads * (2 * self.kv_latent + self.rope_dim)

    @property
    def expansion(self) -> Expansion:
        """A chunk is long enough from twice the tokens at which both forms take the same FLOPs.

        For each head, to expand a position takes kv_latent · (nope_dim + v_dim) multiplications,
        once a chunk. A pair of tokens then takes nope_dim + rope_dim + v_dim of them; absorbed it
        takes 2 · kv_latent + rope_dim. For DeepSeek-V3 `least` is 342.
        """
        own = self.nope_dim + self.v_dim
        saved = 2 * self.kv_latent - own
        least = math.ceil(2 * self.kv_latent * own / saved) if saved > 0 else math.inf
        width, products = self.q_heads * (own + self.rope_dim), self.q_heads * self.kv_latent * own
        return Expansion(least, width, products)

    @property
    def head_width(self) -> int:
        """Queries before and after RoPE, and after absorption; mixed latents and values; a prompt
        chunk's keys and values."""
        query = self.nope_dim + self.rope_dim
        return 2 * query + (self.kv_latent + self.rope_dim) + self.kv_latent + 3 * self.v_dim

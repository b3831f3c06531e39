"""Multi-matrix factorization attention: its sizes, and its answers (`config.model.Attention`)."""

import msgspec

from jaxserve.config.model import Attention, Rope


class MFA(Attention, msgspec.Struct, frozen=True, tag="mfa", forbid_unknown_fields=True):
    """Multi-matrix factorization attention (Step-3 §2.2)."""

    computed_by = "jaxserve.model.attention.mfa:FactorizedAttention"

    q_heads: int
    kv_heads: int
    head_dim: int
    latent: int
    """Width of the low-rank query (share_q_dim)."""
    rope: Rope
    window: int = 0

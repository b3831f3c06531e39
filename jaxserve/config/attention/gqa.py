"""Grouped-query attention: its sizes, and its answers (`config.model.Attention`)."""

from typing import Literal

import msgspec

from jaxserve.config.model import Attention, Rope


class GQA(Attention, msgspec.Struct, frozen=True, tag="gqa", forbid_unknown_fields=True):
    """Grouped-query attention."""

    computed_by = "jaxserve.model.attention.gqa:GroupedQueryAttention"

    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    qk_norm: Literal["none", "heads", "columns"] = "none"
    """RMSNorms of q and k before RoPE: `heads` norms every head with the same weights; `columns`
    norms all heads of a token together, with a weight for every column."""
    qkv_bias: bool = False
    out_bias: bool = False
    gate: Literal["none", "heads", "columns"] = "none"
    """The output is multiplied by the sigmoid of a linear map of the token, with a number for every
    head or for every column of all heads."""
    sinks: bool = False
    """Whether the softmax of every head has one more score, a weight, whose value is zero."""

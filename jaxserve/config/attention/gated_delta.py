"""Gated DeltaNet: its sizes, and its answers (`config.model.Attention`)."""

import msgspec

from jaxserve.config.model import Attention


class DeltaNet(Attention, msgspec.Struct, frozen=True, tag="gdn", forbid_unknown_fields=True):
    """Gated DeltaNet (arXiv 2412.06464): linear attention whose heads each keep a matrix, the
    state, instead of keys and values of all tokens."""

    computed_by = "jaxserve.model.attention.gated_delta:GatedDeltaNet"
    copies_heads = False
    floats_alone = True
    rows_a_token = 0.0

    q_heads: int
    """Heads of values and of the output; a multiple of `kv_heads`, each of which serves as many."""
    kv_heads: int
    """Heads of queries and keys."""
    head_dim: int
    """Width of a query and a key."""
    value_dim: int
    """Width of a value. A head's state is a matrix [head_dim, value_dim]."""
    convolution: int
    """Tokens that the causal convolution of queries, keys and values sees."""

    @property
    def state_numbers(self) -> int:
        return self.q_heads * self.head_dim * self.value_dim

    @property
    def pair_flops(self) -> float:
        """FLOPs of a token's change of the state, and of what it reads."""
        return 7.0 * self.state_numbers

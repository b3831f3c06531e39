"""The dispatch message of a layer, unpacked: what the attention role sends to the ffn role."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jaxserve.model.quant.rows import EncodedRows


class DispatchMessage(NamedTuple):
    """A message, unpacked."""

    tokens: Float[Array, "tokens d_model"]
    experts: Int[Array, "tokens top_k"] | None
    """None in dense layers."""
    gates: Float[Array, "tokens top_k"] | None
    encoded: EncodedRows | None = None
    """The tokens encoded for the wire, in 8 bits: if the norm already quantised them or, behind the
    link, if they came in it; else None. On TPUs `wide` then."""
    wide: EncodedRows | None = None
    """The same behind the link, as the first columns of the received rows, so that picking some of
    these copies no others."""

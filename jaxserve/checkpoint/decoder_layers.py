"""Layers of decoders whose layers all have the same attention, for the families that are such."""

from collections.abc import Collection

from jaxserve.config.model import FFN, Attention, LayerKind


def decoder_layers(
    layers: int,
    attention: Attention,
    dense: FFN,
    moe: FFN | None = None,
    experts: Collection[int] = (),
) -> tuple[LayerKind, ...]:
    """Decoder layers with one attention: FFN `moe` in layers of `experts`, else `dense`."""
    ffns = (moe if moe and layer in experts else dense for layer in range(layers))
    return tuple(LayerKind(attention, ffn) for ffn in ffns)

"""Width of a packed row, for code that packs rows and code that plans: plain Python."""

from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS, scaled
from jaxserve.config.model import ModelConfig

TILE_COLUMNS = 128
"""Words side by side in a tile of a TPU's memory, whatever their size."""


class RowBytes(NamedTuple):
    """Bytes of a row."""

    packed: int
    """Bytes of a row on its way to the experts."""
    result: int
    """Bytes of a result, or of a part of its sum, on its way back."""
    added: int = 0
    """Bytes of a part of a sum on the way, in the model's dtype; 0: same as `result`."""


def row_words(d_model: int, top_k: int, word_bytes: int, *, has_scale: bool) -> int:
    """Words of a row on its way to the ffn role: values, an FP32 scale, ids and gates of 4 bytes.

    Where the values fill whole tiles, so do the rows, with zeros at their end (fewer than 128
    words). Otherwise a TPU keeps the message transposed, which wastes less, and each program copies
    it, or the rows in BF16 that are made of it, into order.
    """
    used = d_model + (4 * has_scale + 8 * top_k) // word_bytes
    return used if d_model % TILE_COLUMNS else -(-used // TILE_COLUMNS) * TILE_COLUMNS


def result_words(d_model: int) -> int:
    """Bytes of a row of results in INT8: values and an FP32 scale, with zeros as above."""
    return row_words(d_model, 0, 1, has_scale=True)


def row_bytes(d_model: int, top_k: int, sent: str, dtype: str, returned: str = "") -> RowBytes:
    """Bytes of rows that a model in `dtype` sends in the format `sent`. Results return in
    `returned`, if that has scales, else in `dtype`."""
    size, result = FORMATS[sent].bits // 8, d_model * FORMATS[dtype].bits // 8
    words = row_words(d_model, top_k, size, has_scale=scaled(sent))
    if scaled(returned):
        return RowBytes(words * size, result_words(d_model), added=result)
    return RowBytes(words * size, result)


def deployment_row_bytes(config: ModelConfig, deployment: Deployment) -> RowBytes:
    """Bytes of the rows of layers with routed experts."""
    sent, returned = deployment.dispatch_format, deployment.combine_format
    return row_bytes(config.d_model, config.top_k, sent, deployment.dtype, returned)

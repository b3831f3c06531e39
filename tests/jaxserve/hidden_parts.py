"""Hidden rows in INT8 with the same scales in all layouts of a draw.

An INT8 product quantises rows over the columns that its device holds. Devices that divide the d_ff
of a dense network or of the shared expert therefore round parts of its hidden rows, which changes
its output by a percent. For a draw every device rounds the parts of the most divided layout.
"""

import math

import pytest
from flax import nnx

from jaxserve.model.ffn.block import FFNBlock
from jaxserve.model.ffn.dense import DenseFFN
from jaxserve.model.module import linear
from pallas_kernels.grouped_matmul.dense import dense_swiglu
from pallas_kernels.quantize import QuantArray
from tests.jaxserve.draws import Draw


def parts_of(draw: Draw) -> int:
    """Most devices that divide a network's d_ff in the draw, if they round parts of its rows."""
    keys = {"colocated": "attention.dp", "afd": "ffn.ep"}
    engines = [one for one in (draw.decode, draw.prefill) if one and draw.format == "int8"]
    return max((one.get(keys[one["mode"]], 1) for one in engines), default=1)


def round_parts(patch: pytest.MonkeyPatch, parts: int) -> None:
    """Has the programs that are made while the patch holds round this many parts of a row."""
    init, call = FFNBlock.__init__, DenseFFN.__call__

    def made(self, config, spec, ranks, *given, **options):
        init(self, config, spec, ranks, *given, **options)
        if self.dense is not None:
            self.dense.parts = parts // (1 if self.own_rows else math.prod(ranks))

    def divided(self, x, encoded=None):
        if self.parts == 1:
            return call(self, x, encoded)
        *inner, down = self.gate[...], self.up[...], self.down[...]
        factor = 1 if self.share is None else nnx.sigmoid(linear(x, self.share))
        width, total = down.shape[1] // self.parts, 0
        assert width * self.parts == down.shape[1]
        for own in (slice(start, start + width) for start in range(0, down.shape[1], width)):
            part = [QuantArray(each.values[own], each.scales[own], each.block) for each in inner]
            part.append(QuantArray(down.values[:, own], down.scales, down.block))
            total += factor * dense_swiglu(x, part, None, self.activation)
        return total

    patch.setattr(FFNBlock, "__init__", made)
    patch.setattr(DenseFFN, "__call__", divided)

"""SwiGLU feed-forward: dense layers and the shared expert. Runs inside `shard_map` on the ffn mesh,
with d_ff split over all its devices, over the tensor axis alone, or not at all; the caller sums the
shares. With INT8 weights each device rounds its own columns of the hidden rows by their largest
value, so that the number of devices changes the output by a percent."""

from collections.abc import Callable
from typing import Any, Literal

from flax import nnx
from jaxtyping import Array, Float

from jaxserve.model.message import EncodedRows
from jaxserve.model.module import Formats, linear, matrix, weight
from pallas_kernels.activation import SWIGLU, Activation
from pallas_kernels.grouped_matmul.dense import dense_swiglu, swiglu_steps, swiglu_steps_of_fp8
from pallas_kernels.quantize import QuantArray


class DenseFFN(nnx.Module):
    """down(activation(x·gate, x·up)), perhaps times σ(x·share).

    Attributes:
      activation: see `gated` of the kernels.
      share: [1, d_model]; None: the output is not gated.
      gate, up: [d_ff, d_model].
      down: [d_model, d_ff].
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        formats: Formats,
        rngs: nnx.Rngs,
        *,
        dimension: Literal["d_ff", "shared_d_ff", "own_d_ff"] = "d_ff",
        activation: Activation = SWIGLU,
        gated: bool = False,
    ):
        self.activation = activation
        self.share = weight(rngs, formats.dtype, shares=1, d_model=d_model) if gated else None
        self._in_blocks = formats.expert_rows in (None, "fp8") and activation == SWIGLU
        hidden = {dimension: d_ff}
        self.gate = matrix(rngs, formats, **hidden, d_model=d_model)
        self.up = matrix(rngs, formats, **hidden, d_model=d_model)
        self.down = matrix(rngs, formats, d_model=d_model, **hidden)

    def __call__(
        self, x: Float[Array, "tokens d_model"], encoded: EncodedRows | None = None
    ) -> Float[Array, "tokens d_model"]:
        """Computes this device's share of the output, in the dtype of x.

        Args:
          encoded: x as it came over the wire, if in 8 bits.
        """
        weights = self.gate[...], self.up[...], self.down[...]
        share = 1 if self.share is None else nnx.sigmoid(linear(x, self.share))
        return share * dense_swiglu(x, weights, _narrow(encoded), self.activation)

    def steps(
        self, x: Float[Array, "tokens d_model"], wide: EncodedRows | None = None
    ) -> tuple[Callable[[Any], Any], ...]:
        """Returns the computation in steps, for callers that run other work between them.

        The first step takes (x, encoded, wide), each further step the result of the one before, and
        the last step returns the output. For rows like x one kernel may do everything. On Hopper
        GPUs rows that came in FP8 stay in FP8 for FP8 weights, and hidden rows are in FP8 blocks,
        as those of routed experts.

        Args:
          wide: an example of the rows as they came, the first columns of a wider array, if in 8
            bits.
        """
        if self.share is not None:
            return (lambda rows: self(*rows[:2]),)
        weights = self.gate[...], self.up[...], self.down[...]
        if self._in_blocks and wide is not None:
            of_fp8 = swiglu_steps_of_fp8(x, wide.quantised(), weights)
            if of_fp8 is not None:
                hidden, project = of_fp8
                return (lambda rows: hidden(rows[2].quantised())), project
        first, *others = swiglu_steps(x, weights, self.activation)
        return lambda rows: first((rows[0], _narrow(rows[1]))), *others


def _narrow(encoded: EncodedRows | None) -> QuantArray | None:
    return None if encoded is None else encoded.quantised()

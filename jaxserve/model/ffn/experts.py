"""Routed experts: those that a device holds, applied to the tokens that chose them.

Runs inside `shard_map` on the ffn mesh: a device holds its ep rank's slots and its tp rank's share
of their d_ff, sees all tokens, and returns its share of the output. Dropless: the number of tokens
per slot is data. Choices of slots elsewhere, and padding tokens, contribute nothing. Which expert a
slot holds is not known here; on ranks of the shared expert it is a part of that one.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.config.formats import group_of
from jaxserve.config.model import FFN, ModelConfig
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.message import EncodedRows
from jaxserve.model.module import Formats, matrix, zeros
from pallas_kernels.grouped_matmul.api import Biases, fastest_row_format
from pallas_kernels.grouped_matmul.routed import Choices, routed_choices


def slot_sizes(spec: FFN, ranks: int, redundant: int = 0, shared_ranks: int = 0) -> SlotSizes:
    """Computes the slots of a layer's experts.

    Args:
      ranks: all ranks, including those of the shared expert.
      redundant, shared_ranks: see `SlotSizes`.
    """
    parts = -(-spec.d_ff // spec.expert_d_ff) if shared_ranks else 0
    return SlotSizes(spec.experts, ranks - shared_ranks, redundant, shared_ranks, parts)


class RoutedExperts(nnx.Module):
    """Stacked expert weights.

    Attributes:
      gate, up: [expert_slots, expert_d_ff, d_model], d_ff padded with zeros to a multiple of the
        axis that splits it, and of the groups of a format whose groups cannot be smaller.
      down: [expert_slots, d_model, expert_d_ff].
      bias: [expert_slots, 2·expert_d_ff], of gate and up in turns, as files have them; None: the
        model's experts have no biases.
      down_bias: [expert_slots, d_model], or None.
      sizes: numbers of slots.
      local: slots of one layer on one device.
      tensor: mesh axis that divides every expert's d_ff.
      row_format: see `grouped_swiglu`; None: the device's fastest format that loses nothing beyond
        the rounding of the wire.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: FFN,
        ranks: tuple[int, int],
        formats: Formats,
        rngs: nnx.Rngs,
        *,
        redundant: int = 0,
        shared_ranks: int = 0,
    ):
        expert_ranks, tensor_ranks = ranks
        self.tensor = "tp"
        self.sizes = slot_sizes(spec, expert_ranks, redundant, shared_ranks)
        self.local, slots = self.sizes.local, self.sizes.all_slots
        self.row_format, self.activation = formats.expert_rows, spec.expert_activation
        unit = tensor_ranks * max(1, group_of(formats.weights))
        d_model, d_ff = config.d_model, -(-spec.expert_d_ff // unit) * unit
        self.gate = matrix(rngs, formats, expert_slots=slots, expert_d_ff=d_ff, d_model=d_model)
        self.up = matrix(rngs, formats, expert_slots=slots, expert_d_ff=d_ff, d_model=d_model)
        self.down = matrix(rngs, formats, expert_slots=slots, d_model=d_model, expert_d_ff=d_ff)
        biased, dtype = spec.expert_bias, formats.dtype
        self.bias = zeros(rngs, dtype, expert_slots=slots, expert_d_ff=2 * d_ff) if biased else None
        self.down_bias = zeros(rngs, dtype, expert_slots=slots, d_model=d_model) if biased else None

    def choices(
        self,
        x: Float[Array, "tokens d_model"],
        slots: Int[Array, "tokens top_k"],
        gates: Float[Array, "tokens top_k"],
        rank: Int[Array, ""] | int,
        layer: Int[Array, ""] | int = 0,
        encoded: EncodedRows | None = None,
    ) -> Choices:
        """Applies the experts: this device's results of every choice, before they are added up.

        Args:
          slots: of each choice, over all ranks; padding tokens have one past the last.
          gates: FP32 weights.
          rank: this device's ep coordinate.
          layer: index of the layer whose slots to use, where the weights hold several layers' slots
            stacked along the first axis.
          encoded: x as it came over the wire, if in 8 bits; there may be columns behind it.
        """
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        row_format, narrow = self.row_format, None
        if row_format is None:
            row_format = fastest_row_format(x, (gate, up, down))
            narrow = None if encoded is None else encoded.quantised()
        stacked = gate.shape[0] > self.local
        return routed_choices(
            x,
            slots - rank * self.local,
            gates,
            gate,
            up,
            down,
            window=(layer * self.local, self.local) if stacked else None,
            row_format=row_format,
            narrow=narrow,
            among=self.sizes.all_slots,
            activation=self.activation,
            biases=self._biases(),
        )

    def _biases(self) -> Biases | None:
        """Biases of this device's shares of gate and up, and of down, which the first of the
        devices that add up their results adds alone."""
        if self.bias is None or self.down_bias is None:
            return None
        both, down = self.bias[...], self.down_bias[...]
        return both[:, ::2], both[:, 1::2], jnp.where(jax.lax.axis_index(self.tensor) == 0, down, 0)

"""Routed experts: rows sorted by expert, a grouped matmul, gate weights applied here.

Runs inside `shard_map` on the ffn mesh: every device has its ep rank's experts and its tp rank's
share of their d_ff, sees all tokens, and returns its share of the output. Dropless: group sizes are
data, and rows of other devices' experts or of padding tokens fall behind the last group.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.config.model import ModelConfig
from jaxserve.ffn.placement import physical_experts
from jaxserve.module import Formats, matrix
from pallas_kernels.grouped_matmul.api import grouped_swiglu


class Experts(nnx.Module):
    """Stacked expert weights.

    Attributes:
      gate, up: [experts, expert_d_ff, d_model], experts and d_ff padded with zeros to a multiple
        of the axes that split them.
      down: [experts, d_model, expert_d_ff].
      local: experts of one layer on one device.
      row_format: as `grouped_swiglu` takes it.
    """

    def __init__(
        self, config: ModelConfig, ranks: tuple[int, int], formats: Formats, rngs: nnx.Rngs
    ):
        expert_ranks, tensor_ranks = ranks
        experts = physical_experts(config.experts, expert_ranks)
        self.local = experts // expert_ranks
        self.row_format = formats.expert_rows
        d_model, d_ff = config.d_model, -(-config.expert_d_ff // tensor_ranks) * tensor_ranks
        self.gate = matrix(rngs, formats, experts=experts, expert_d_ff=d_ff, d_model=d_model)
        self.up = matrix(rngs, formats, experts=experts, expert_d_ff=d_ff, d_model=d_model)
        self.down = matrix(rngs, formats, experts=experts, d_model=d_model, expert_d_ff=d_ff)

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        experts: Int[Array, "tokens top_k"],
        gates: Float[Array, "tokens top_k"],
        rank: Int[Array, ""] | int,
        layer: Int[Array, ""] | int = 0,
    ) -> Float[Array, "tokens d_model"]:
        """This device's share of Σ_k gate·expert(x), FP32.

        Args:
          experts: ids over all ranks; padding tokens carry an id past the last one.
          gates: FP32 weights.
          rank: this device's ep coordinate.
          layer: which layer's experts to use, where the weights hold those of several layers, one
            layer's after the other's.
        """
        return self.routed(x, experts, gates, rank, layer)[0]

    def routed(
        self,
        x: Float[Array, "tokens d_model"],
        experts: Int[Array, "tokens top_k"],
        gates: Float[Array, "tokens top_k"],
        rank: Int[Array, ""] | int,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "tokens d_model"], Int[Array, " local"]]:
        """The same, and how many tokens each of this device's experts of the layer got."""
        tokens, top_k = experts.shape
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        groups, local = gate.shape[0], self.local
        group = experts.reshape(-1) - rank * local
        group = jnp.where((group >= 0) & (group < local), group + layer * local, groups)
        order = jnp.argsort(group, stable=True)
        sizes = jnp.bincount(group, length=groups).astype(jnp.int32)
        rows = x[order // top_k]
        out = grouped_swiglu(rows, gate, up, down, sizes, row_format=self.row_format)
        out = out.astype(jnp.float32) * gates.reshape(-1)[order][:, None]
        share = jnp.zeros((tokens, x.shape[1]), jnp.float32).at[order // top_k].add(out)
        return share, jax.lax.dynamic_slice_in_dim(sizes, layer * local, local)

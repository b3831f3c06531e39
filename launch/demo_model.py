"""The demo model: Step-3's text architecture, small, as flax modules.

Called by `train_demo.py` and the other `demo_` files. Knows nothing of the corpus or of the engine:
this is a second, independent statement of the mathematics that the engine serves.

Sources: Step-3 report (arXiv 2507.19427), section 3, for multi-matrix factorisation attention and
the mixture of experts; DeepSeek-V3 report (arXiv 2412.19437), section 2.2, for multi-token
prediction. Matrices are [in, out].
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

BLOCK_ROWS = 64  # rows of one expert that are multiplied together
QUERY_ROWS = 256  # queries whose scores are computed together
EMBEDDING_DEVIATION = 0.5  # of the initial embedding


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the model; field names are those of the Hugging Face Step-3 text configuration."""

    vocab_size: int = 3072
    hidden_size: int = 256
    num_hidden_layers: int = 5
    moe_layers_enum: str = "1,2,3"
    num_attention_heads: int = 8
    num_attention_groups: int = 1
    head_dim: int = 64
    share_q_dim: int = 128
    intermediate_size: int = 640
    moe_intermediate_size: int = 64
    share_expert_dim: int = 64
    moe_num_experts: int = 16
    moe_top_k: int = 3
    norm_expert_weight: bool = False
    rope_theta: float = 10000.0
    max_position_embedding: int = 2048
    rms_norm_eps: float = 1e-5
    num_nextn_predict_layers: int = 1

    def is_moe(self, layer: int) -> bool:
        """Whether a layer holds experts; prediction modules, numbered after the layers, always
        do."""
        return layer in self.moe_layers or layer >= self.num_hidden_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices in `moe_layers_enum`."""
        return tuple(int(index) for index in self.moe_layers_enum.split(","))


class Routing(NamedTuple):
    """Routing decisions of one MoE layer, with its balance term.

    balance: experts · Σ_e load_e · mean probability_e, 1 when perfectly even.
    load: [experts], the share of the token-choices that fell on each expert; sums to 1.
    expert: [tokens, top_k], the choices.
    """

    balance: Float[Array, ""]
    load: Float[Array, " experts"]
    expert: Int[Array, "tokens top_k"]


class Linear(nnx.Module):
    """`x @ weight`, weight [in, out], no bias."""

    def __init__(self, features_in: int, features_out: int, *, scale: float = 1.0, rngs: nnx.Rngs):
        deviation = scale * features_in**-0.5
        self.weight = nnx.Param(deviation * rngs.normal((features_in, features_out)))

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        return x @ self.weight[...]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight, in FP32."""

    def __init__(self, features: int, eps: float):
        self.weight = nnx.Param(jnp.ones(features))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + self.eps) * self.weight[...]


def rotate(x: Float[Array, "batch tokens heads head_dim"], theta: float) -> Array:
    """Rotary embedding of positions 0, 1, … in rotate-half form, on all of `head_dim`."""
    half = x.shape[-1] // 2
    frequency = theta ** (-np.arange(half, dtype=np.float32) / half)
    angle = np.arange(x.shape[1], dtype=np.float32)[:, None, None] * frequency  # [tokens, 1, half]
    cos, sin = np.cos(angle), np.sin(angle)  # constants of the compiled program
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class FactorizedAttention(nnx.Module):
    """Multi-matrix factorisation attention: low-rank queries, one K head and one V head.

    q = RMSNorm(x Wq_down) Wq, reshaped to [heads, head_dim]; k and v are not normalised.
    """

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.theta = config.rope_theta
        width = self.heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, config.share_q_dim, rngs=rngs)
        self.k_proj = Linear(config.hidden_size, config.head_dim, rngs=rngs)
        self.v_proj = Linear(config.hidden_size, config.head_dim, rngs=rngs)
        self.inter_norm = RMSNorm(config.share_q_dim, config.rms_norm_eps)
        self.wq = Linear(config.share_q_dim, width, rngs=rngs)
        self.o_proj = Linear(width, config.hidden_size, scale=0.5, rngs=rngs)

    def __call__(self, x: Float[Array, "batch tokens d_model"]) -> Array:
        batch, tokens, _ = x.shape
        query = self.wq(self.inter_norm(self.q_proj(x)))
        query = rotate(query.reshape(batch, tokens, self.heads, self.head_dim), self.theta)
        key = rotate(self.k_proj(x)[:, :, None, :], self.theta)[:, :, 0, :]
        value = self.v_proj(x)
        query = query * self.head_dim**-0.5
        # One sequence after the other: on a CPU, scores that stay in the cache are worth more than
        # a large batch; and recomputing them costs less than reading them back.
        attend = jax.checkpoint(causal_attention)
        mixed = jax.lax.map(lambda sequence: attend(*sequence), (query, key, value))
        return self.o_proj(mixed.reshape(batch, tokens, self.heads * self.head_dim))


def causal_attention(
    query: Float[Array, "tokens heads head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
) -> Float[Array, "tokens heads head_dim"]:
    """Causal softmax attention of all heads on one K head and one V head.

    In pieces of queries, so that most of the invisible half of the scores is never computed; the
    heads of a query are rows of one product, so nothing is transposed.
    """
    tokens, heads, head_dim = query.shape
    pieces = []
    for start in range(0, tokens, QUERY_ROWS):
        end = min(start + QUERY_ROWS, tokens)
        scores = query[start:end].reshape(-1, head_dim) @ key[:end].T
        position = np.repeat(np.arange(start, end), heads)
        visible = position[:, None] >= np.arange(end)[None, :]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        pieces.append((weights @ value[:end]).reshape(-1, heads, head_dim))
    return jnp.concatenate(pieces, axis=0)


class GatedMLP(nnx.Module):
    """SwiGLU: (silu(x W_gate) · x W_up) W_down."""

    def __init__(self, d_model: int, d_ff: int, rngs: nnx.Rngs):
        self.gate_proj = Linear(d_model, d_ff, rngs=rngs)
        self.up_proj = Linear(d_model, d_ff, rngs=rngs)
        self.down_proj = Linear(d_ff, d_model, scale=0.5, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """Routed experts: softmax router, top-k, raw probabilities as weights (not renormalised)."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        experts, d_model = config.moe_num_experts, config.hidden_size
        d_ff = config.moe_intermediate_size
        self.top_k = config.moe_top_k
        self.gate = Linear(d_model, experts, rngs=rngs)
        self.gate_proj = nnx.Param(d_model**-0.5 * rngs.normal((experts, d_model, d_ff)))
        self.up_proj = nnx.Param(d_model**-0.5 * rngs.normal((experts, d_model, d_ff)))
        self.down_proj = nnx.Param(d_ff**-0.5 * rngs.normal((experts, d_ff, d_model)))

    def __call__(self, x: Float[Array, "tokens d_model"]) -> tuple[Array, Routing]:
        probability = jax.nn.softmax(self.gate(x), axis=-1)
        weight, expert = jax.lax.top_k(probability, self.top_k)
        experts = probability.shape[-1]
        load = jnp.zeros(experts).at[expert.reshape(-1)].add(1.0) / expert.size
        balance = experts * jnp.sum(load * probability.mean(axis=0))
        blocks = arrange_blocks(expert, experts)
        return self._apply(x, weight, blocks), Routing(balance, load, expert)

    def _apply(self, x: Array, weight: Array, blocks: "Blocks") -> Array:
        """Runs every block through its expert and sums each token's weighted rows."""
        rows = gather_rows(x, blocks.token, blocks.slot)  # [blocks·rows, d_model]
        rows = rows.reshape(len(blocks.expert), -1, x.shape[1])
        gate = jnp.einsum("brd,bdf->brf", rows, self.gate_proj[...][blocks.expert])
        up = jnp.einsum("brd,bdf->brf", rows, self.up_proj[...][blocks.expert])
        hidden = jax.nn.silu(gate) * up
        out = jnp.einsum("brf,bfd->brd", hidden, self.down_proj[...][blocks.expert])
        per_choice = collect_rows(out.reshape(-1, x.shape[1]), blocks.slot, blocks.token)
        return jnp.einsum("tkd,tk->td", per_choice, weight)


class Blocks(NamedTuple):
    """Token-choices sorted by expert, each expert's rows padded to whole blocks.

    expert: [blocks], the expert of each block.
    token: [blocks · rows], the token whose row stands there; `tokens` for padding.
    slot: [tokens, top_k], where each token-choice stands.
    """

    expert: Int[Array, " blocks"]
    token: Int[Array, " rows"]
    slot: Int[Array, "tokens top_k"]


def arrange_blocks(expert: Int[Array, "tokens top_k"], experts: int) -> Blocks:
    """Sorts token-choices by expert into blocks of one expert each; no choice is dropped.

    The number of blocks is static: what the choices fill, and one more an expert for padding.
    """
    tokens, top_k = expert.shape
    flat = expert.reshape(-1)
    chosen = jax.nn.one_hot(flat, experts, dtype=jnp.int32)  # [choices, experts]
    count = chosen.sum(axis=0)
    rank = ((jnp.cumsum(chosen, axis=0) - chosen) * chosen).sum(axis=1)
    padded = -(-count // BLOCK_ROWS) * BLOCK_ROWS
    end = jnp.cumsum(padded)
    slot = (end - padded)[flat] + rank
    blocks = -(-flat.size // BLOCK_ROWS) + experts
    token = jnp.full(blocks * BLOCK_ROWS, tokens, jnp.int32)
    token = token.at[slot].set(jnp.arange(flat.size, dtype=jnp.int32) // top_k, unique_indices=True)
    block_expert = jnp.searchsorted(end, jnp.arange(blocks) * BLOCK_ROWS, side="right")
    block_expert = jnp.minimum(block_expert, experts - 1)
    return Blocks(block_expert, token, slot.reshape(tokens, top_k))


@jax.custom_vjp
def gather_rows(x: Array, token: Array, slot: Array) -> Float[Array, "rows d_model"]:
    """x[token], zero where token is out of range. The gradient is a gather by `slot`, too."""
    return jnp.take(x, token, axis=0, mode="fill", fill_value=0)


gather_rows.defvjp(
    lambda x, token, slot: (gather_rows(x, token, slot), slot),
    lambda slot, gradient: (gradient[slot].sum(axis=1), None, None),
)


@jax.custom_vjp
def collect_rows(rows: Array, slot: Array, token: Array) -> Float[Array, "tokens top_k d_model"]:
    """rows[slot]. The gradient is a gather: a row belongs to one token-choice or to none."""
    return rows[slot]


def _collect_rows_backward(
    residual: tuple[Array, Array], gradient: Array
) -> tuple[Array, None, None]:
    slot, token = residual
    choice = jnp.full(token.shape, slot.size, jnp.int32)
    choice = choice.at[slot.reshape(-1)].set(
        jnp.arange(slot.size, dtype=jnp.int32), unique_indices=True
    )
    flat = gradient.reshape(slot.size, -1)
    return jnp.take(flat, choice, axis=0, mode="fill", fill_value=0), None, None


collect_rows.defvjp(lambda rows, slot, token: (rows[slot], (slot, token)), _collect_rows_backward)


class DecoderLayer(nnx.Module):
    """Norm, attention, residual; norm, dense MLP or experts with a shared expert, residual."""

    def __init__(self, config: DemoConfig, layer: int, rngs: nnx.Rngs):
        d_model, eps = config.hidden_size, config.rms_norm_eps
        self.is_moe = config.is_moe(layer)
        self.input_layernorm = RMSNorm(d_model, eps)
        self.self_attn = FactorizedAttention(config, rngs)
        self.post_attention_layernorm = RMSNorm(d_model, eps)
        if self.is_moe:
            self.moe = Experts(config, rngs)
            self.share_expert = GatedMLP(d_model, config.share_expert_dim, rngs)
        else:
            self.mlp = GatedMLP(d_model, config.intermediate_size, rngs)

    def __call__(
        self, x: Float[Array, "batch tokens d_model"]
    ) -> tuple[Float[Array, "batch tokens d_model"], Routing | None]:
        x = x + self.self_attn(self.input_layernorm(x))
        normed = self.post_attention_layernorm(x)
        if not self.is_moe:
            return x + self.mlp(normed), None
        routed, routing = self.moe(normed.reshape(-1, x.shape[-1]))
        return x + routed.reshape(x.shape) + self.share_expert(normed), routing


class PredictionModule(nnx.Module):
    """Multi-token prediction, DeepSeek-V3 section 2.2: one decoder layer that looks one further.

    h' = eh_proj([enorm(embed(t_{i+1})), hnorm(h_i)]), h_i after the main model's final norm.
    """

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        d_model, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(d_model, eps), RMSNorm(d_model, eps)
        self.eh_proj = Linear(2 * d_model, d_model, rngs=rngs)
        self.decoder = DecoderLayer(config, config.num_hidden_layers, rngs)
        self.norm = RMSNorm(d_model, eps)

    def __call__(
        self, embedded_next: Float[Array, "batch tokens d_model"], hidden: Array
    ) -> tuple[Float[Array, "batch tokens d_model"], Routing]:
        joined = jnp.concatenate([self.enorm(embedded_next), self.hnorm(hidden)], axis=-1)
        out, routing = self.decoder(self.eh_proj(joined))
        assert routing is not None
        return self.norm(out), routing


class DemoModel(nnx.Module):
    """The whole model. `hidden` and `predict` share the embedding and the head."""

    def __init__(self, config: DemoConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Param(
            rngs.normal((config.vocab_size, config.hidden_size)) * EMBEDDING_DEVIATION
        )
        self.layers = nnx.List(
            [DecoderLayer(config, layer, rngs) for layer in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, scale=0.2, rngs=rngs)
        self.predictions = nnx.List(
            [PredictionModule(config, rngs) for _ in range(config.num_nextn_predict_layers)]
        )

    def hidden(
        self, tokens: Int[Array, "batch tokens"]
    ) -> tuple[Float[Array, "batch tokens d_model"], list[Routing]]:
        """Hidden states after the final norm; `lm_head` makes logits of t_{i+1} of them."""
        x = self.embed_tokens[...][tokens]
        routings = []
        for layer in self.layers:
            x, routing = layer(x)
            if routing is not None:
                routings.append(routing)
        return self.norm(x), routings

    def predict(
        self, next_tokens: Int[Array, "batch tokens"], hidden: Array, module: int = 0
    ) -> tuple[Float[Array, "batch tokens d_model"], Routing]:
        """A prediction module's states; `lm_head` makes logits of them.

        Args:
          next_tokens: t_{i+1} for the first module, whose states predict t_{i+2}; one further on
            for every module after it.
          hidden: h_i of the main model, or the states of the module before.
          module: its number.
        """
        return self.predictions[module](self.embed_tokens[...][next_tokens], hidden)

"""Computes a layer in FP32 on whole sequences and returns the inputs of its matrices.

Called by `layers.py`. The serving modules attend over pages and return only outputs; calibration
needs the inputs of every matrix. The attention here is the same without pages. Its tests compare it
with the NumPy models.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.calibration.gptq import dequantised
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.attention.mfa import MFA
from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import Attention, ModelConfig
from jaxserve.config.model import RouterSpec as Rule
from jaxserve.errors import ConfigError
from jaxserve.model.attention.rope import paired, rotation
from jaxserve.model.ffn.router import ExpertRouter
from jaxserve.model.module import Template, rms_norm
from pallas_kernels.activation import SWIGLU
from pallas_kernels.rotate_and_write import rotate


def refuse_unsupported(config: ModelConfig) -> None:
    """Refuses a model whose layers compute something that this module leaves out.

    Raises:
      ConfigError: names all of it.
    """
    kinds = config.decoder + config.predictors
    found = {
        "gates of heads": any(getattr(kind.attention, "gate", "none") != "none" for kind in kinds),
        "other attention than MFA, GQA and MLA": not all(
            isinstance(kind.attention, MFA | GQA | MLA) for kind in kinds
        ),
        "indexers": any(kind.attention.indexer for kind in kinds),
        "sinks": any(getattr(kind.attention, "sinks", False) for kind in kinds),
        "limits of SwiGLU": any(
            {kind.ffn.activation, kind.ffn.expert_activation} != {SWIGLU} for kind in kinds
        ),
        "biases of experts": any(kind.ffn.expert_bias for kind in kinds),
        "heads of prediction modules": config.own_heads,
    }
    if missing := [name for name, used in found.items() if used]:
        raise ConfigError(f"calibration does not compute {', '.join(missing)}, which the model has")


Leaves = Mapping[str, np.ndarray]
"""Float leaves of a block by name."""

Inputs = dict[str, Array]
"""Inputs [tokens, d_in] by leaf; matrices with one input share the first leaf's entry."""


class RoutedRows(NamedTuple):
    """Experts that the router chose for each row, with gate weights."""

    experts: np.ndarray
    """int [tokens, top_k]."""
    gates: np.ndarray
    """FP32 [tokens, top_k]."""

    def rows_of(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows that chose it, their gates [rows, 1])."""
        rows, choice = np.nonzero(self.experts == expert)
        return rows, self.gates[rows, choice][:, None]


def attend(
    config: ModelConfig, spec: Attention, leaves: Leaves, x: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Computes the residual stream after attention, and the inputs of attention's matrices.

    Args:
      x: the residual stream before attention, FP32 [sequences, tokens, d_model].

    Returns:
      The residual stream, shaped like x, and inputs [sequences · tokens, d_in] by leaf (see
      `Inputs`).
    """
    floats = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
    done = [_attend_one(config, spec, floats, sequence) for sequence in x]
    inputs = {
        name: np.concatenate([np.asarray(found[name]) for _, found in done]) for name in done[0][1]
    }
    return np.stack([np.asarray(rows) for rows, _ in done]), inputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_one(
    config: ModelConfig,
    spec: Attention,
    leaves: dict[str, Array],
    x: Float[Array, "tokens d_model"],
) -> tuple[Array, Inputs]:
    normed = rms_norm(x, leaves["input_norm"], config.norm_epsilon)
    own = {
        name.removeprefix("attention."): leaf
        for name, leaf in leaves.items()
        if name.startswith("attention.")
    }
    families: dict[type, Callable[..., tuple[Array, Inputs]]] = {MFA: _mfa, GQA: _gqa, MLA: _mla}
    mixed, inputs = families[type(spec)](config, spec, own, normed)
    inputs["out"] = mixed.reshape(x.shape[0], -1)
    share = _linear(inputs["out"], own["out"], own.get("out_bias"))
    return x + share, {f"attention.{name}": rows for name, rows in inputs.items()}


def _mfa(
    config: ModelConfig, sizes: MFA, leaves: dict[str, Array], x: Array
) -> tuple[Array, Inputs]:
    tokens = x.shape[0]
    kv = sizes.kv_heads * sizes.head_dim
    query, key, value = jnp.split(
        _linear(x, leaves["down"]), [sizes.latent, sizes.latent + kv], axis=-1
    )
    latent = rms_norm(query, leaves["inter_norm"], config.norm_epsilon)
    turn = rotation(jnp.arange(tokens), sizes.head_dim, sizes.rope)
    query = rotate(_linear(latent, leaves["up"]).reshape(tokens, -1, sizes.head_dim), *turn)
    key = rotate(key.reshape(tokens, sizes.kv_heads, -1), *turn)
    value = value.reshape(tokens, sizes.kv_heads, -1)
    mixed = _mixed(query, key, value, sizes.head_dim**-0.5, sizes.window)
    return mixed, {"down": x, "up": latent}


def _gqa(
    config: ModelConfig, sizes: GQA, leaves: dict[str, Array], x: Array
) -> tuple[Array, Inputs]:
    tokens = x.shape[0]
    turn = rotation(jnp.arange(tokens), sizes.head_dim, sizes.rope)

    def heads(name: str) -> Array:
        made = _linear(x, leaves[name], leaves.get(f"{name}_bias"))
        norm = leaves.get(f"{name}_norm")
        if norm is not None:  # of a head, or of all heads together
            made = rms_norm(made.reshape(tokens, -1, norm.size), norm, config.norm_epsilon)
        return made.reshape(tokens, -1, sizes.head_dim)

    query, key = (rotate(paired(heads(name), sizes.rope), *turn) for name in ("query", "key"))
    mixed = _mixed(query, key, heads("value"), sizes.head_dim**-0.5, sizes.window)
    return mixed, {"query": x}


def _mla(
    config: ModelConfig, sizes: MLA, leaves: dict[str, Array], x: Array
) -> tuple[Array, Inputs]:
    tokens = x.shape[0]
    down = _linear(x, leaves["down"], leaves.get("down_bias"))
    low, row = jnp.split(down, [sizes.q_latent], axis=-1)
    inputs = {"down": x}
    if sizes.q_latent:
        inputs["query_up"] = rms_norm(low, leaves["query_norm"], sizes.latent_epsilon)
    query = _linear(inputs.get("query_up", x), leaves["query_up"]).reshape(
        tokens, sizes.q_heads, -1
    )
    latent = rms_norm(row[:, : sizes.kv_latent], leaves["latent_norm"], sizes.latent_epsilon)
    turn = functools.partial(rotate, interleaved=sizes.rope.interleaved)
    angles = rotation(jnp.arange(tokens), sizes.rope_dim, sizes.rope)
    shared = turn(row[:, None, sizes.kv_latent :], *angles)
    key = jnp.einsum("tc,hnc->thn", latent, leaves["key_up"], precision="highest")
    shared = jnp.broadcast_to(shared, (*key.shape[:2], sizes.rope_dim))
    nope, rope = jnp.split(query, [sizes.nope_dim], axis=-1)
    query = jnp.concatenate([nope, turn(rope, *angles)], axis=-1)
    value = jnp.einsum("tc,hvc->thv", latent, leaves["value_up"], precision="highest")
    return _mixed(
        query, jnp.concatenate([key, shared], -1), value, sizes.scale, sizes.window
    ), inputs


def _linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    product = jnp.einsum("ti,oi->to", x, w, precision="highest")
    return product if bias is None else product + bias


def _mixed(query: Array, key: Array, value: Array, scale: float, window: int) -> Array:
    """Causal attention over Q, K and V [tokens, heads, width]; each K/V head serves an equal number
    of query heads. `window`: tokens that a token attends to; 0: all."""
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(heads, group, axis=1) for heads in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key, precision="highest") * scale
    place = jnp.arange(query.shape[0])
    before = place[:, None] - place
    visible = (before >= 0) & ((before < window) if window else True)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, value, precision="highest")


def normed_rows(config: ModelConfig, norm: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The FFN's input, [sequences · tokens, d_model]."""
    rows = jnp.asarray(x.reshape(-1, x.shape[-1]), jnp.float32)
    return np.asarray(rms_norm(rows, jnp.asarray(norm, jnp.float32), config.norm_epsilon))


def route(rule: Rule, leaves: Leaves, normed: np.ndarray) -> RoutedRows:
    """Chooses each row's experts with the serving router, in FP32."""
    template = Template(
        functools.partial(ExpertRouter, normed.shape[1], rule, jnp.dtype(jnp.float32))
    )
    router = template.merge(
        [jnp.asarray(leaves[f"router.{n}"], jnp.float32) for n in template.names]
    )
    experts, gates = router(jnp.asarray(normed), jnp.ones(len(normed), bool), rule.experts)
    return RoutedRows(np.asarray(experts), np.asarray(gates))


def units(leaves: Leaves, routing: RoutedRows | None) -> Iterator[tuple[str, int | None]]:
    """Yields the FFNs of a block: (prefix of the leaves, expert number; None for the dense FFN)."""
    if any(name.startswith("dense.") for name in leaves):
        yield "dense", None
    if routing is not None:
        stack = next(leaf for name, leaf in leaves.items() if name.startswith("experts."))
        yield from (("experts", expert) for expert in range(len(stack)))


def unit(leaves: Leaves, name: str, expert: int | None, part: str) -> np.ndarray:
    """One matrix of an FFN in FP32, from float or quantised leaves."""

    def own(leaf: str) -> np.ndarray:
        found = leaves[leaf] if expert is None else leaves[leaf][expert]
        return np.asarray(found, np.float32)

    path = f"{name}.{part}"
    if path in leaves:
        return own(path)
    return dequantised(own(f"{path}.values"), own(f"{path}.scales"))


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(x·gate) · (x·up): the input of the down matrix."""
    product = x @ gate.T
    return product * (0.5 + 0.5 * np.tanh(0.5 * product)) * (x @ up.T)


def feed_forward(leaves: Leaves, normed: np.ndarray, routing: RoutedRows | None) -> np.ndarray:
    """The FFN's output, [tokens, d_model]."""
    total = np.zeros_like(normed)
    for name, expert in units(leaves, routing):
        gate, up, down = (unit(leaves, name, expert, part) for part in ("gate", "up", "down"))
        if expert is None or routing is None:
            total += gated(normed, gate, up) @ down.T
            continue
        rows, gates = routing.rows_of(expert)
        total[rows] += gates * (gated(normed[rows], gate, up) @ down.T)
    return total

"""Step-3's attention layer and one FFN shard of 2A2F as a whole; the planner reads their times.

Norms, rotary embedding and transfers between devices are left out. The FFN begins and ends with
tokens: their rows go to the experts and come back.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.model_batch import attend
from pallas_kernels.attention.shapes import SHAPES as ATTENTION
from pallas_kernels.bench import attention, grouped_matmul
from pallas_kernels.grouped_matmul.dense import dense_matmul, dense_swiglu
from pallas_kernels.grouped_matmul.routed import combine, routed_choices
from pallas_kernels.grouped_matmul.shapes import SHAPES as EXPERTS

D_MODEL, Q_RANK = 7168, 2048

PLANNER_FORMATS = {"bf16": "bfloat16", "int8": "int8", "fp8": "fp8"}
FORMATS = {name: format for format, name in PLANNER_FORMATS.items()}
LOADS, FFN_TOKENS = ((64, 32768), (128, 4096), (128, 8192)), 2048
"""Sequences and their lengths that an attention layer is timed with; tokens of an FFN shard."""
PRODUCTS = 3
"""Products in a row in a layer. Each rounds its rows anew, so that a layer is off by the square
root of as many times what one product may be: by 0.067 with FP8 weights on an H100."""
STAGES = (("bf16", "bf16"), ("fp8", "bf16"), ("int8", "int8"), ("fp8", "fp8"))
"""Formats of weights and cache. The second pair is what Step-3's paper times (table 9)."""


def attention_layer(
    step: attention.Step, weight_format: str, d_model: int, q_rank: int
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Returns the function of the layer, its arguments, rows first, and the arguments whose results
    are checked.

    K and V of the batch are computed, and added to the sum so that nothing is dropped, but the
    pages are not written. Products are those of an engine: XLA's where no kernel is meant for them.
    """
    shape = step.shape
    _, pages, scales, where = attention.inputs(step)
    q_width, out_width = shape.q_heads * shape.head_dim, shape.q_heads * shape.v_width
    kv_width = shape.kv_heads * (shape.head_dim + shape.v_width)
    sizes = ((q_rank + kv_width, d_model), (q_width, q_rank), (d_model, out_width))
    keys = jax.random.split(jax.random.key(1), len(sizes) + 1)
    weights = tuple(
        jax.tree.map(lambda array: array[0], grouped_matmul.weight(key, (1, *size), weight_format))
        for key, size in zip(keys, sizes, strict=False)
    )

    def product(rows: Any, weight: Any) -> Any:
        return dense_matmul(rows, weight).astype(rows.dtype)

    def layer(rows: Any, weights: Any, pages: Any, scales: Any, where: Any) -> Any:
        first = product(rows, weights[0])
        queries = product(first[:, :q_rank], weights[1])
        queries = queries.reshape(-1, shape.q_heads, shape.head_dim)
        mixed = attend(shape, queries, pages, scales, where)
        out = product(mixed.reshape(-1, out_width), weights[2])
        return out + first[:, q_rank:].sum(axis=1, keepdims=True)

    rows = jax.random.normal(keys[-1], (step.sequences, d_model), jnp.bfloat16)
    last, _, _, last_where = attention.checked((rows, pages, scales, where))
    return layer, (rows, weights, pages, scales, where), (last, weights, pages, scales, last_where)


def ffn_shard(
    routed: grouped_matmul.Step, shared: grouped_matmul.Step
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Returns the function of one device's routed and shared experts, its arguments, rows first,
    and the arguments whose results are checked: all tokens.

    Choices are even, and of all experts of the layer, of which this device has some.
    """
    shape, tokens = routed.shape, routed.tokens
    _, *routed_weights, _ = grouped_matmul.inputs(routed)
    rows, *shared_weights, _ = grouped_matmul.inputs(shared)
    shared_weights = jax.tree.map(lambda array: array[0], shared_weights)
    choices = jnp.arange(tokens * shape.top_k, dtype=jnp.int32) % shape.experts
    choices = jax.random.permutation(jax.random.key(2), choices).reshape(tokens, shape.top_k)
    gates = jnp.full(choices.shape, 1 / shape.top_k)

    def shard(rows: Any, choices: Any, gates: Any, routed_weights: Any, shared_weights: Any) -> Any:
        share = combine(*routed_choices(rows, choices, gates, *routed_weights))
        return share + dense_swiglu(rows, tuple(shared_weights)).astype(share.dtype)

    arguments = (rows, choices, gates, routed_weights, shared_weights)
    return shard, arguments, arguments


def stages(quick: bool, page_size: int) -> list[tuple[dict[str, Any], Any, tuple[Any, ...]]]:
    """Each measurement without its seconds, with its function and arguments, made one by one."""
    loads = ((2, 2 * page_size),) if quick else LOADS
    found: list[Any] = []
    for format, cache in STAGES:
        common = {"model": "step3", "format": PLANNER_FORMATS[format]}
        of_cache = {} if cache == format else {"cache": PLANNER_FORMATS[cache]}
        for batch, context in loads:
            shape = ATTENTION["step3"]
            sizes = (D_MODEL, Q_RANK)
            if quick:
                shape, sizes = shape._replace(q_heads=4, head_dim=64, v_width=64), (128, 128)
            step = attention.Step(shape, cache, batch, context, page_size)
            entry = common | of_cache | {"op": "attend", "batch": batch, "context": context}
            found.append((entry, attention_layer, (step, format, *sizes)))
        if cache != format:
            continue
        tokens = 16 if quick else FFN_TOKENS
        shapes = [EXPERTS[name] for name in ("step3_2a2f", "step3_2a2f_shared")]
        if quick:
            shapes = [shape._replace(d_model=128, d_ff=64) for shape in shapes]
        entry = common | {"op": "ffn", "batch": tokens, "context": 8192, "ep": 2, "ffn_tp": 8}
        pair = tuple(grouped_matmul.Step(shape, format, tokens) for shape in shapes)
        found.append((entry, ffn_shard, pair))
    return found

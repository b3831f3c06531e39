"""RoPE of queries and keys, and writing of keys and values: checks the call, runs the backend.

Called by attention layers between their projections and `paged_attention`. Only Hopper GPUs have a
kernel (`mosaic_gpu.py`): there, what takes time in a decode step is that kernels start one after
the other. On TPUs, as elsewhere, XLA fuses the norms and the rotation, of queries in the form of
`rotate_tpu.py`, and `write_rows` writes.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention.api import write_rows
from pallas_kernels.attention.checks import check_tokens
from pallas_kernels.coverage import kernel_target
from pallas_kernels.norm_quantize.reference import rms_norm
from pallas_kernels.quantize import EIGHT_BITS, Words
from pallas_kernels.rotate_and_write import reference, rotate_tpu
from pallas_kernels.target import current_target, kernels
from pallas_kernels.transforms import run_op

OP = "rotate_and_write"
_COST = "does the same in about six more launches"


def rotate_and_write(
    pages: tuple[Num[Array, "..."] | Words, ...],
    query: Float[Array, "tokens q_heads head_dim"],
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads v_width"],
    cosine: Float32[Array, "tokens half"],
    sine: Float32[Array, "tokens half"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    query_norm: Float[Array, " head_dim"] | None = None,
    key_norm: Float[Array, " head_dim"] | None = None,
    epsilon: float = 0.0,
    joined: Float[Array, "tokens columns"] | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Rotates queries and keys, quantises keys and values to the cache's format, and writes them.

    Pairs (i, i + head_dim/2) are rotated in FP32 and rounded to x's dtype, as `rotate` does it;
    values and scales are those of `quantize_rows`, a scale for each token and head. Rows go to the
    same places as in `attention.write_rows`; in place if the caller donates the pages.

    Args:
      pages: keys and values [pages, kv_heads, page_size, width], floats, INT8, or the bits of FP8
        (uint8); in 8 bits also the FP32 scales of both, [pages, kv_heads, page_size].
      cosine, sine: cosines and sines of every token's angles; half is head_dim/2.
      query_norm, key_norm: weights of an RMSNorm of every head before its rotation, in the dtype of
        queries, or FP32, with which XLA norms before a kernel runs; None: no norm.
      epsilon: epsilon of the norms.
      joined: array that ends in the columns of all keys and then those of all values, which a
        kernel reads in their place: XLA need not cut them out.

    Returns:
      the queries, in their dtype or, by the kernel, already as Hopper's `paged_attention`
      multiplies them: in another dtype or, for pages in FP8, as `TwoTerms`; and the pages.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    if query_norm is not None and key_norm is not None and query_norm.dtype != query.dtype:
        # FP32 weights: kernels norm in the rows' dtype.
        query, key = rms_norm(query, query_norm, epsilon), rms_norm(key, key_norm, epsilon)
        query_norm = key_norm = joined = None
    _check(pages, query, key, value, (cosine, sine), (query_norm, key_norm))
    wheres = (page_table, sequence_of_token, position)
    check_tokens(query.shape[0], *wheres)
    target = kernel_target(
        OP,
        lambda target: kernels(OP, target).gap(pages, query, value),
        _COST,
        fused_on_tpus=True,
    )

    def compute(
        pages: tuple[Any, ...],
        heads: tuple[Array, Array, Array, Array | None],
        turn: tuple[Array, Array],
        where: tuple[Array, Array, Array],
        norms: tuple[Array | None, Array | None],
    ) -> tuple[Any, tuple[Any, ...]]:
        if target is not None:
            return kernels(OP, target).rotate_and_write(
                pages, heads, turn, where, norms, epsilon=epsilon, target=target
            )
        query, key = (
            _rotated(x, norm, epsilon, turn) for x, norm in zip(heads[:2], norms, strict=True)
        )
        kept = [reference.kept(new, pages[0]) for new in (key, heads[2])]
        rows = [values for values, _ in kept]
        rows += [scales for _, scales in kept if scales is not None]
        return query, write_rows(pages, tuple(rows), *where)

    norms = (query_norm, key_norm)
    heads = query, key, value, joined
    return run_op(OP, compute, pages, heads, (cosine, sine), wheres, norms)


def _rotated(x: Array, norm: Array | None, epsilon: float, turn: tuple[Array, Array]) -> Array:
    if current_target().backend != "mosaic_tpu" or not rotate_tpu.covers(x):
        return reference.rotated(x, norm, epsilon, *turn)
    return rotate_tpu.rotate(x if norm is None else rms_norm(x, norm, epsilon), *turn)


def _check(
    pages: tuple[Any, ...],
    query: Array,
    key: Array,
    value: Array,
    turn: tuple[Array, Array],
    norms: tuple[Array | None, Array | None],
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        if x.ndim != 3 or 0 in x.shape[1:] or not floats or x.dtype != query.dtype:
            raise ValueError(
                f"{name} is {x.dtype}{x.shape}, needs floats [tokens, heads, width] in one dtype"
            )
    tokens, _, width = query.shape
    if width % 2 or key.shape[::2] != (tokens, width) or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} must agree in tokens, "
            "query and key in an even head_dim, key and value in heads"
        )
    for name, x in zip(("cosine", "sine"), turn, strict=True):
        if x.shape != (tokens, width // 2) or x.dtype != jnp.float32:
            raise ValueError(f"{name} is {x.dtype}{x.shape}, needs float32{(tokens, width // 2)}")
    for name, norm in zip(("query_norm", "key_norm"), norms, strict=True):
        if norm is not None and (norm.shape != (width,) or norm.dtype != query.dtype):
            raise ValueError(
                f"{name} is {norm.dtype}{norm.shape}, needs {query.dtype}({width},), as query has"
            )
    eight_bits = bool(pages) and pages[0].dtype in EIGHT_BITS
    if len(pages) != (4 if eight_bits else 2) or pages[0].dtype != pages[1].dtype:
        raise ValueError(
            f"pages are {[str(array.dtype) for array in pages]}, need keys and values in one "
            "dtype, and the scales of both where these are in 8 bits"
        )
    places = (key.shape[1], pages[0].shape[2])
    for index, (array, x) in enumerate(zip(pages, (key, value) * 2, strict=False)):
        expected = (pages[0].shape[0], *places, *((x.shape[2],) if index < 2 else ()))
        if array.shape != expected:
            raise ValueError(f"pages[{index}] has shape {array.shape}, needs {expected}")

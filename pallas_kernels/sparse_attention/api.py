"""Choice of the cached rows with the best index scores, and attention to these rows: checks the
call, then runs the device's kernels or plain XLA.

Called by latent attention with an indexer (DeepSeek-V3.2 §2.1). Batches, pages and places are those
of `attention/api.py`, with one key and value head.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention.checks import (
    check_pages,
    check_places,
    check_rope,
    check_tokens,
    check_values,
)
from pallas_kernels.attention.reference import Cache
from pallas_kernels.coverage import kernel_target
from pallas_kernels.sparse_attention import gathered, reference
from pallas_kernels.target import kernels
from pallas_kernels.transforms import run_op

_SCORE_COST = (
    "copies the keys of a decoding sequence, or of 16 tokens of a prompt, before it scores"
)
_ATTEND_COST = "copies the chosen rows before it multiplies, 3 times the bytes"


def choose_positions(
    queries: Float[Array, "tokens index_heads index_dim"],
    weights: Float32[Array, "tokens index_heads"],
    pages: tuple[Num[Array, "..."], ...],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    top_k: int,
) -> Int32[Array, "tokens chosen"]:
    """Chooses for every token the positions up to its own with the highest index scores.

    The score of position s is Σ_h weights[h] · ReLU(queries[h] · key[s]) (DeepSeek-V3.2, equation
    1), in FP32. Equal scores are frequent, since ReLU gives zeros: **the lowest position wins**, on
    every backend, and -0 equals 0. So workers that recompute a sequence choose the same rows. A
    position whose score is -inf is never chosen.

    Args:
      pages: the keys [pages, 1, page_size, index_dim], floats, INT8 or the bits of FP8 (uint8); in
        8 bits also their FP32 scales [pages, 1, page_size].
      top_k: most positions that are chosen.

    Returns:
      the positions in increasing order, top_k or the table's tokens if these are fewer; -1 behind
      the last one of a token that sees fewer.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    key_pages, key_scales = _keys_and_scales(pages)
    tokens, heads, width = queries.shape
    check_tokens(tokens, page_table, sequence_of_token, position)
    if key_pages.shape[1] != 1 or key_pages.shape[3] != width:
        raise ValueError(f"pages[0] has shape {key_pages.shape}, queries need one head of {width}")
    if weights.shape != (tokens, heads) or weights.dtype != jnp.float32:
        raise ValueError(f"weights is {weights.dtype}{weights.shape}, needs float32{tokens, heads}")
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}, needs at least 1")
    call = reference.ChoiceCall(
        queries, weights, key_pages, key_scales, page_table, sequence_of_token, position
    )
    target = kernel_target(
        "choose_positions",
        lambda target: kernels("sparse_attention", target).gap(call, target),
        _SCORE_COST,
    )

    def compute(call: reference.ChoiceCall) -> Array:
        if target is None:
            return reference.choose_positions(call, top_k)
        return kernels("sparse_attention", target).choose_positions(call, top_k, target)

    return run_op("choose_positions", compute, call)


def attend_chosen(
    queries: Float[Array, "tokens q_heads head_dim"],
    pages: tuple[Num[Array, "..."], ...],
    chosen: Int32[Array, "tokens chosen"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    *,
    scale: float,
    v_width: int,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """Attends from every token to the chosen positions of its sequence, which all heads share.

    Scores are `scale * query . key`; scores and softmax are FP32. The first `v_width` elements of a
    row are its value. A token for which nothing is chosen gives zeros. Rows that are not chosen
    have no effect, even if they are NaN.

    Args:
      pages: as those of `rotate_and_write.norm_and_write`.
      chosen: positions, each at most once; -1 behind the last one.

    Returns:
      the outputs, and log(sum(exp(scores))) of every token and head, -inf where nothing is chosen.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    rope_pages = pages[1] if len(pages) == 3 else None
    k_pages, k_scales = _keys_and_scales((pages[0], *pages[2:]) if len(pages) == 3 else pages)
    check_values(k_pages, None, v_width, None)
    width = k_pages.shape[3]
    if rope_pages is not None:
        check_rope(rope_pages, k_pages, None)
        width += rope_pages.shape[3]
    if k_pages.shape[1] != 1 or queries.shape[2] != width:
        raise ValueError(
            f"queries has head_dim {queries.shape[2]}, pages have {k_pages.shape[1]} heads of "
            f"{width}, needs one of the same width"
        )
    tokens = queries.shape[0]
    check_places(tokens, sequence_of_token, sequence_of_token)
    if chosen.ndim != 2 or chosen.shape[0] != tokens or chosen.dtype != jnp.int32:
        raise ValueError(f"chosen is {chosen.dtype}{chosen.shape}, needs int32 rows of {tokens}")
    cache = Cache(k_pages, None, k_scales, None, v_width, rope_pages)
    gap = functools.partial(gathered.gap, queries, cache)
    target = kernel_target("attend_chosen", gap, _ATTEND_COST)

    def compute(
        queries: Array, arrays: tuple[Array, Array | None, Array | None], where: reference.Chosen
    ) -> tuple[Array, Array]:
        pages, scales, rope = arrays
        cache = Cache(pages, None, scales, None, v_width, rope)
        if target is None:
            return reference.attend_chosen(queries, cache, where, scale)
        return gathered.attend_chosen(queries, cache, where, scale, target)

    arrays = k_pages, k_scales, rope_pages
    where = reference.Chosen(chosen, page_table, sequence_of_token)
    return run_op("attend_chosen", compute, queries, arrays, where)


def _keys_and_scales(pages: tuple[Array, ...]) -> tuple[Array, Array | None]:
    """Returns pages and, in 8 bits, their scales, else None."""
    if len(pages) not in (1, 2):
        raise ValueError(f"{len(pages)} arrays of pages, need one, or in 8 bits also its scales")
    keys, scales = pages[0], pages[1] if len(pages) == 2 else None
    check_pages("pages[0]", keys, "scales", scales)
    return keys, scales

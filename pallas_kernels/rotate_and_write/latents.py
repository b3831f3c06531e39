"""Norms latents, rotates the key beside them, and writes both: checks the call, runs the backend.

Called by latent attention (MLA) between its down maps and its other products. As with
`rotate_and_write`, only Hopper GPUs have a kernel (`mosaic_gpu_latents.py`).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention.checks import check_tokens
from pallas_kernels.coverage import kernel_target
from pallas_kernels.quantize import EIGHT_BITS, Words
from pallas_kernels.rotate_and_write import reference
from pallas_kernels.target import kernels
from pallas_kernels.transforms import run_op

OP = "norm_and_write"
_COST = "does the same in about four more launches"


class Latents(NamedTuple):
    """Results of `norm_and_write`."""

    query: Float[Array, "tokens q_latent"]
    """The queries' latents, normed; without columns if the call has no `query_norm`."""
    row: Float[Array, "tokens kv_latent_and_rope"] | None
    """The cached rows as read back, in the dtype of `down`; None unless `stored`."""
    pages: tuple[Any, ...]


def norm_and_write(
    pages: tuple[Num[Array, "..."] | Words, ...],
    down: Float[Array, "tokens columns"],
    cosine: Float32[Array, "tokens half"],
    sine: Float32[Array, "tokens half"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
    *,
    latent_norm: Float[Array, " kv_latent"],
    query_norm: Float[Array, " q_latent"] | None = None,
    epsilon: float = 0.0,
    interleaved: bool = False,
    stored: bool = False,
) -> Latents:
    """Norms the queries' and the cached latents and rotates the key that all heads share. Writes
    the cached latents and keys to the pages, quantised to the cache's format.

    A token's columns of `down` are its query latent, its cached latent and its key. Norms and
    rotation are computed in FP32 and rounded to the dtype of `down`; values and scales are those of
    `quantize_rows`. Rows go to the same places as in `attention.write_rows`; in place if the caller
    donates the pages.

    Args:
      pages: one array [pages, 1, page_size, kv_latent + rope_dim], floats, INT8, or the bits of FP8
        (uint8), in 8 bits with FP32 scales [pages, 1, page_size]; or three, the latents in 8 bits,
        the keys in floats, and the scales of the former. More columns of the one array must be
        zeros, and stay so.
      cosine, sine: cosines and sines of every token's angles; half is rope_dim/2.
      latent_norm, query_norm: the weights of the RMSNorms; without `query_norm` the columns of
        `down` begin with the cached latent.
      interleaved: pairs of the key are neighbours, and become two halves, as `rotate` says.
      stored: whether the cached rows are returned too.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: it is differentiated; or as `coverage.kernel_target`.
    """
    _check(pages, down, (cosine, sine), latent_norm, query_norm)
    wheres = (page_table, sequence_of_token, position)
    check_tokens(down.shape[0], *wheres)
    target = kernel_target(
        OP,
        lambda target: kernels("rotate_and_write", target, "_latents").gap(
            pages, down, latent_norm, query_norm
        ),
        _COST,
        fused_on_tpus=True,
    )

    def compute(
        pages: tuple[Any, ...],
        down: Array,
        turn: tuple[Array, Array],
        where: tuple[Array, Array, Array],
        norms: tuple[Array, Array | None],
    ) -> Latents:
        options = (epsilon, interleaved, stored)
        call = reference.LatentsCall(pages, down, turn, where, norms, *options)
        if target is None:
            return Latents(*reference.norm_and_write(call))
        kernel = kernels("rotate_and_write", target, "_latents")
        return Latents(*kernel.norm_and_write(call, target))

    norms = (latent_norm, query_norm)
    return run_op(OP, compute, pages, down, (cosine, sine), wheres, norms)


def _check(
    pages: tuple[Any, ...],
    down: Array,
    turn: tuple[Array, Array],
    latent_norm: Array,
    query_norm: Array | None,
) -> None:
    if down.ndim != 2 or not jnp.issubdtype(down.dtype, jnp.floating):
        raise ValueError(f"down is {down.dtype}{down.shape}, needs floats [tokens, columns]")
    for name, norm in (("latent_norm", latent_norm), ("query_norm", query_norm)):
        if norm is not None and (norm.ndim != 1 or not norm.size or norm.dtype != down.dtype):
            raise ValueError(
                f"{name} is {norm.dtype}{norm.shape}, needs {down.dtype} of one axis, as down has"
            )
    tokens, columns = down.shape
    for name, x in zip(("cosine", "sine"), turn, strict=True):
        shape = (tokens, turn[0].shape[-1])
        if x.shape != shape or not shape[1] or x.dtype != jnp.float32:
            raise ValueError(f"{name} is {x.dtype}{x.shape}, needs float32{shape}")
    q_latent = 0 if query_norm is None else query_norm.size
    latent, rope = latent_norm.size, 2 * turn[0].shape[1]
    if columns != q_latent + latent + rope:
        raise ValueError(
            f"down has {columns} columns, and query_norm, latent_norm and the angles are of "
            f"{q_latent} + {latent} + {rope}"
        )
    eight_bits = bool(pages) and pages[0].dtype in EIGHT_BITS
    if len(pages) not in ((2, 3) if eight_bits else (1,)):
        raise ValueError(
            f"pages are {[str(array.dtype) for array in pages]}, need latents in floats, or in 8 "
            "bits with their scales, between them the keys or not"
        )
    whole = max(latent + rope, pages[0].shape[-1])
    widths = [(latent,), (rope,), ()] if len(pages) == 3 else [(whole,), ()]
    for index, (array, width) in enumerate(zip(pages, widths, strict=False)):
        expected = (pages[0].shape[0], 1, pages[0].shape[2], *width)
        if array.shape != expected:
            raise ValueError(f"pages[{index}] has shape {array.shape}, needs {expected}")
    if eight_bits and pages[-1].dtype != jnp.float32:
        raise ValueError(f"scales are {pages[-1].dtype}, need float32")

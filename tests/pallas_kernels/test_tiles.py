"""`tiles=` of the ops: what fits changes the kernel, what does not is named with its limits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import chunk_attention, paged_attention
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.shapes import H200, V6E, shape

CPU = Target("reference", "cpu")


def integers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


PAGES = shape(64, 1, 64, 128)
DECODE = shape(4, 8, 128), PAGES, PAGES, integers(4, 2048), integers(4), integers(4)
DRAFTS = shape(64, 8, 128), PAGES, PAGES, integers(4, 2048), integers(64), integers(64)
CHUNK = *(shape(1024, 4, 128),) * 3, integers(1024), integers(1024)
PRODUCT = shape(64, 256), shape(4, 256, 256), integers(4)
SWIGLU = shape(64, 256), *(shape(4, 256, 256),) * 3, integers(4)
NORM = shape(4, 1024), shape(1024)

attend = functools.partial(paged_attention, scale=0.1)
inside = functools.partial(chunk_attention, scale=0.1)
norm = functools.partial(rms_norm_quantize, epsilon=1e-5, format="int8")


@pytest.mark.parametrize(
    ("target", "op", "arguments", "tiles", "error"),
    [
        (V6E, attend, DECODE, {"block_tokens": 96}, "block_tokens is 96, needs a multiple of page"),
        (V6E, attend, DECODE, {"tile_rows": 64}, r"'tile_rows'; known: \['block_tokens'\]"),
        (V6E, attend, DECODE, {"block_tokens": 65536}, "block_tokens 65536 takes .* bytes of VMEM"),
        (V6E, attend, DRAFTS, {"tile_rows": 100}, "tile_rows is 100, needs a multiple of the 16"),
        (V6E, attend, DRAFTS, {"item_rows": 300}, "item_rows is 300, needs a multiple of 256"),
        (V6E, inside, CHUNK, {"tile": 100}, "tile is 100, needs a multiple of 128 up to 2048"),
        (H200, attend, DECODE, {"blocks": 500}, "blocks is 500, needs 1 .* to 132, of NVIDIA"),
        (H200, attend, DECODE, {"stages": 7}, "stages is 7, needs 2 to 6, which fill the shared"),
        (V6E, grouped_matmul, PRODUCT, {"tile_rows": 100}, "tile_rows is 100, needs a multiple"),
        (V6E, grouped_matmul, PRODUCT, {"steps": (1024,)}, r"steps is \(1024,\), needs descending"),
        (V6E, grouped_matmul, PRODUCT, {"steps": 64}, "steps is 64, needs a tuple of integers"),
        (V6E, grouped_swiglu, SWIGLU, {"step_columns": 100}, "step_columns is 100, needs a mult"),
        (V6E, grouped_swiglu, SWIGLU, {"weights_bytes": 9}, "_bytes is 9, needs 1.* to 5872"),
        (H200, grouped_matmul, PRODUCT, {"rows": (512,)}, r"rows is \(512,\), needs .* up to 256"),
        (H200, grouped_matmul, PRODUCT, {"out": 96}, "out is 96, needs a multiple of 128 up to"),
        (H200, grouped_matmul, PRODUCT, {"most_stages": 99}, "most_stages is 99, needs 2 to 10"),
        (H200, grouped_swiglu, SWIGLU, {"band": 0}, "band is 0, needs a positive integer"),
        (H200, norm, NORM, {"vector": 3}, r"vector is 3, needs one of \[8, 4, 2, 1\]"),
        (CPU, attend, DECODE, {"block_tokens": 64}, "plain XLA, which has none, runs on cpu"),
        (CPU, grouped_matmul, PRODUCT, {"rows": (16,)}, "plain XLA, which has none, runs on cpu"),
        (V6E, norm, NORM, {"vector": 1}, "no kernel for norms, which XLA fuses there"),
    ],
)
def test_what_does_not_fit_is_named_with_its_limits(target, op, arguments, tiles, error):
    with use_target(target), pytest.raises(ValueError, match=error) as raised:
        jax.eval_shape(functools.partial(op, tiles=tiles), *arguments)
    assert str(raised.value).startswith("tiles of ")


def test_the_reference_has_none():
    options = {"tiles": {"band": 4}, "implementation": "reference"}
    with pytest.raises(ValueError, match=r"implementation is 'reference', which has none"):
        jax.eval_shape(functools.partial(grouped_matmul, **options), *PRODUCT)


def test_they_reach_the_kernel():
    """The ring holds four blocks of a page each, not of all that a table has."""
    pages = shape(8, 1, 16, 128, dtype=jnp.float32)
    queries, where = shape(2, 8, 128, dtype=jnp.float32), (integers(2, 4), integers(2), integers(2))
    with use_target(V6E):
        small, whole = (
            str(
                jax.make_jaxpr(functools.partial(attend, tiles=tiles))(
                    queries, pages, pages, *where
                )
            )
            for tiles in ({"block_tokens": 16}, None)
        )
    assert "[4,1,16,128]" in small
    assert "[4,1,64,128]" in whole

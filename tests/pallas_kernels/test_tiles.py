"""`tiles=` of the ops: what fits changes the kernel, what does not is named with its limits."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention import paged_attention
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.shapes import H200, V6E, shape

CPU = Target("reference", "cpu")


def integers(*sizes):
    return shape(*sizes, dtype=jnp.int32)


PAGES = shape(64, 1, 64, 128)
DECODE = shape(4, 8, 128), PAGES, PAGES, integers(4, 2048), integers(4), integers(4)
DRAFTS = shape(64, 8, 128), PAGES, PAGES, integers(4, 2048), integers(64), integers(64)
PRODUCT = shape(64, 256), shape(4, 256, 256), integers(4)
SWIGLU = shape(64, 256), *(shape(4, 256, 256),) * 3, integers(4)

attend = functools.partial(paged_attention, scale=0.1)


def test_what_does_not_fit_is_named_with_its_limits():
    def call(target, op, arguments, **tiles):
        with use_target(target):
            jax.eval_shape(functools.partial(op, tiles=tiles), *arguments)

    products = {"grouped_matmul": grouped_matmul, "grouped_swiglu": grouped_swiglu}
    names = globals() | {"H200": H200} | products
    golden.check_arguments("pallas_kernels/tiles.txt", ValueError, call, names)


def test_they_reach_the_kernel():
    """The ring holds four blocks of a page each, or 32 of all that a table has."""
    pages = shape(8, 1, 16, 128, dtype=jnp.float32)
    queries, where = shape(2, 8, 128, dtype=jnp.float32), (integers(2, 4), integers(2), integers(2))
    calls = (functools.partial(attend, tiles=tiles) for tiles in ({"block_tokens": 16}, None))
    with use_target(V6E):
        small, whole = (str(jax.make_jaxpr(call)(queries, pages, pages, *where)) for call in calls)
    assert "[4,1,16,128]" in small
    assert "[32,1,64,128]" in whole

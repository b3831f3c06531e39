"""What a program is compiled with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxserve.model.module import rms_norm
from jaxserve.roles.program import REPLICATED, Program
from pallas_kernels.attention.api import paged_attention

WIDTH, PAGES, PAGE_SIZE = 512, 12, 16


def _body(page_bucket, window, x, pages, position):
    """A norm, and attention of 8 heads to blocks of one sequence's pages: all that is summed along
    rows in a step and is not a product."""
    normed = rms_norm(x, jnp.ones(WIDTH), 1e-6)
    table = jnp.arange(page_bucket, dtype=jnp.int32)[None] % PAGES
    mine = jnp.zeros(x.shape[0], jnp.int32)
    queries = normed.reshape(-1, 8, 64)
    attended = paged_attention(
        queries, pages, pages, table, mine, position, scale=0.125, window=window
    )
    return normed, attended


@pytest.mark.parametrize(
    ("other_rows", "page_bucket", "window"),
    [
        *((other_rows, page_bucket, 40) for other_rows, page_bucket in ((1, 12), (7, 12), (2, 64))),
        *((40, 5, window) for window in (0, 7, 40, 150, 1000)),
    ],
)
def test_a_row_is_the_same_in_any_step_on_cpus(other_rows, page_bucket, window):
    """XLA:CPU would begin to sum otherwise at 8 rows of 512, and at 4 of 8 heads' 128 scores."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(41, WIDTH)).astype(np.float32)
    pages = rng.normal(size=(PAGES, 2, PAGE_SIZE, 64)).astype(np.float32)
    seen = min(PAGES, page_bucket) * PAGE_SIZE
    position = rng.integers(1, seen, 41).astype(np.int32)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("dp", "tp"))
    found = []
    for count, bucket in ((1, PAGES), (1 + other_rows, page_bucket)):
        arguments = rows[-count:], pages, position[-count:]
        everywhere = NamedSharding(mesh, REPLICATED)
        shapes = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in arguments
        )
        body = functools.partial(_body, bucket, window)
        program = Program("rows", body, mesh, shapes, (REPLICATED,) * 2)
        found.append([np.asarray(made[-1]) for made in program.compile()(*arguments)])
    for alone, among in zip(*found, strict=True):
        assert np.abs(alone).max() > 0
        np.testing.assert_array_equal(among, alone)

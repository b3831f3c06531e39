"""The kernel that writes rows of 8 bits, interpreted, against the scatter of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import reference, write_rows, write_tpu_kernel
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.tpu_races import no_race  # noqa: F401

POOL, HEADS, PAGE, WIDTH, TOKENS = 9, 2, 64, 256, 48


@pytest.fixture(autouse=True)
def four_buffers(monkeypatch):
    monkeypatch.setattr(write_tpu_kernel, "BUFFERS", 4)
    monkeypatch.setattr(write_tpu_kernel, "AHEAD", 2)


def batch(runs, order=None):
    """Three sequences of two pages, one outside of the pool; (owner, start, tokens) runs."""
    table = jnp.asarray([[3, 0], [7, 8], [4, POOL]], jnp.int32)
    sequence = [owner for owner, _, count in runs for _ in range(count)]
    position = [start + token for _, start, count in runs for token in range(count)]
    padding = [-1] * (TOKENS - len(position))
    columns = (np.asarray(column + padding, np.int32) for column in (sequence, position))
    return table, *(jnp.asarray(column if order is None else column[order]) for column in columns)


def write(where, dtype=jnp.uint8):
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.integers(0, 127, (POOL, HEADS, PAGE, WIDTH)), dtype)
    rows = jnp.asarray(rng.normal(size=(TOKENS, HEADS, WIDTH)) * 9)
    rows = rows.astype(jnp.float8_e4m3fn if dtype == jnp.uint8 else dtype)
    with use_target(Target("mosaic_tpu", "TPU7x", interpret=True)):
        (written,) = jax.jit(write_rows)((pages,), (rows,), *where)
    (expected,) = reference.write_rows((pages,), (rows,), *where)
    np.testing.assert_array_equal(written, expected)
    return int((np.asarray(written) != np.asarray(pages)).any((1, 3)).sum())


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("runs", "order", "count"),
    [
        # Over two tiles, to a page's end, and beyond the pool.
        ([(0, 30, 5), (1, 62, 4), (2, 60, 9)], None, 13),
        # One tile after the other in both pages: more than there are buffers.
        ([(1, 1, 40), (0, 127, 1), (2, 0, 1), (0, 5, 1)], None, 43),
        # Tokens of a tile that do not follow each other.
        ([(0, 32, 20)], np.arange(TOKENS)[::-1], 20),
        ([], None, 0),
    ],
)
def test_it_is_the_reference(runs, order, count):
    assert write(batch(runs, order)) == count


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.float32])
def test_other_formats(dtype, monkeypatch):
    monkeypatch.setattr(write_tpu_kernel, "is_written_by_tiles", lambda pages: True)
    assert write(batch([(0, 3, 2)]), dtype) == 2

"""Writing page after page, against the scatter of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import reference, write_rows, write_tpu
from pallas_kernels.attention.write_tpu_kernel import is_written_by_tiles
from pallas_kernels.quantize.words import Words, in_words
from pallas_kernels.target import Target, use_target
from tests import golden

PAGE, POOL, TOKENS, SEQUENCES, COLUMNS = 4, 9, 16, 3, 3

by_pages = jax.jit(write_tpu.write_rows)
by_tiles = jax.jit(write_tpu.write_scales)


@settings(max_examples=100)
@given(data=st.data())
def test_it_is_the_reference(data):
    """Chunks, padding, tokens beyond the table, ids outside of the pool; also in words."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pages = jnp.asarray(rng.integers(0, 255, (POOL, 2, PAGE, 4)), jnp.uint8)
    rows = jnp.asarray(rng.normal(size=(TOKENS, 2, 4)), jnp.float8_e4m3fn)
    where = draw_batch(data, rng, PAGE)
    (expected,) = reference.write_rows((pages,), (rows,), *where)
    np.testing.assert_array_equal(by_pages(pages, rows, reference.Where(*where)), expected)
    words = Words(in_words(jnp.swapaxes(pages, 2, 3)), pages.dtype, 0, POOL, swapped=True)
    found = by_pages(words, rows, reference.Where(*where)).array()
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=100)
@given(
    data=st.data(),
    heads=st.sampled_from([1, 4]),
    page=st.sampled_from([128, 256]),
    pool=st.sampled_from([8, POOL]),
)
def test_scales_are_the_reference(data, heads, page, pool):
    """Tiles of eight rows and of fewer, down to one."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scales = jnp.asarray(rng.normal(size=(pool, heads, page)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(TOKENS, heads)), jnp.float32)
    where = draw_batch(data, rng, page)
    (expected,) = reference.write_rows((scales,), (rows,), *where)
    np.testing.assert_array_equal(by_tiles(scales, rows, reference.Where(*where)), expected)


def draw_batch(data, rng, page):
    """Page table, sequences, and positions."""
    table = rng.permutation(POOL).reshape(SEQUENCES, COLUMNS)
    table[rng.random(table.shape) < 0.2] = data.draw(st.sampled_from([-1, POOL, 2**31 - 1]))
    sequence, position = [], []
    for owner in range(SEQUENCES):
        count = data.draw(st.integers(0, TOKENS // SEQUENCES))
        start = data.draw(st.integers(0, page * COLUMNS))
        sequence += [owner] * count
        position += range(start, start + count)
    padding = TOKENS - len(sequence)
    order = rng.permutation(TOKENS) if data.draw(st.booleans()) else np.arange(TOKENS)
    return (
        jnp.asarray(table, jnp.int32),
        jnp.asarray(np.asarray(sequence + [-1] * padding)[order], jnp.int32),
        jnp.asarray(np.asarray(position + [-1] * padding)[order], jnp.int32),
    )


def test_of_tokens_at_one_place_one_is_written():
    pages = jnp.zeros((1, 1, PAGE, 1))
    rows = jnp.asarray([1.0, 2.0]).reshape(2, 1, 1)
    where = (jnp.zeros((1, 1), jnp.int32), jnp.zeros(2, jnp.int32), jnp.full(2, 1, jnp.int32))
    written = np.asarray(by_pages(pages, rows, reference.Where(*where)))[0, 0, :, 0]
    assert written[1] in (1, 2)
    np.testing.assert_array_equal(written[[0, 2, 3]], 0)


def test_the_call_takes_it_for_a_tpu():
    """A latent and its scales; a width of 128 goes the common way."""
    pages = (jnp.zeros((2, 1, PAGE, 3), jnp.int8), jnp.zeros((2, 1, PAGE)))
    rows = (jnp.full((1, 1, 3), 5, jnp.int8), jnp.full((1, 1), 0.5))
    where = (jnp.asarray([[1]], jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, 2, jnp.int32))
    with use_target(Target("mosaic_tpu", "TPU v6 lite")):
        latent, scales = write_rows(pages, rows, *where)
    assert np.argwhere(np.asarray(latent)[..., 0]).tolist() == [[1, 0, 2]]
    assert np.argwhere(np.asarray(scales)).tolist() == [[1, 0, 2]]


def test_which_way_pages_are_written():
    """Page by page, and scales in tiles where XLA would not keep them as a scatter does; the kernel
    writes pages of 8 bits."""
    ways = write_tpu.is_swapped, write_tpu.is_scattered_in_tiles, is_written_by_tiles

    def call(*sizes, dtype="float32"):
        return [way.__name__ for way in ways if way(jnp.zeros(sizes, dtype))]

    golden.check_values("pallas_kernels/write_ways.txt", call, globals())

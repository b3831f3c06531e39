"""`write_rows` and `paged_attention` against literal expectations."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import paged_attention, write_rows

pytestmark = pytest.mark.unoptimised

PAGE = 4


def int32(values):
    return jnp.asarray(values, jnp.int32)


class TestWriteRows:
    def test_places(self):
        pages = jnp.zeros((4, 1, PAGE, 1))
        keys = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1)
        # Sequence 0 has the pages 3, 1; sequence 1 has page 0.
        page_table = int32([[3, 1], [0, 9]])
        k_pages, v_pages = write_rows(
            (pages, pages), (keys, -keys), page_table, int32([0, 0, 1, 0]), int32([3, 4, 2, -1])
        )
        expected = [[0, 0, 3, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
        np.testing.assert_array_equal(k_pages[:, 0, :, 0], expected)
        np.testing.assert_array_equal(v_pages[:, 0, :, 0], -np.asarray(expected))

    @pytest.mark.parametrize(
        ("page_id", "sequence", "position"),
        [(0, 0, -1), (2, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, PAGE), (0, 0, 2**30)],
    )
    def test_what_has_no_place_is_dropped(self, page_id, sequence, position):
        pages, rows = (jnp.zeros((2, 1, PAGE, 2)),) * 2, (jnp.ones((1, 1, 2)),) * 2
        written = write_rows(pages, rows, *map(int32, ([[page_id]], [sequence], [position])))
        assert not any(array.any() for array in written)

    def test_rows_of_fp8_go_into_pages_of_their_bits(self):
        pages = (jnp.zeros((1, 1, PAGE), jnp.uint8),)
        rows = (jnp.asarray([[1.0], [-2.0]], jnp.float8_e4m3fn),)
        (written,) = write_rows(pages, rows, int32([[0]]), int32([0, 0]), int32([3, 1]))
        assert written.dtype == jnp.uint8
        np.testing.assert_array_equal(written[0, 0], [0, 0xC0, 0, 0x38])


class TestPagedAttention:
    def test_large_scores_do_not_overflow(self):
        pages = jnp.full((1, 1, PAGE, 1), 1e4)
        output, _ = paged_attention(
            jnp.full((1, 1, 1), 1e4), pages, pages, int32([[0]]), int32([0]), int32([2]), scale=1.0
        )
        np.testing.assert_allclose(output, [[[1e4]]], rtol=1e-6)

"""`write_rows` and `paged_attention` against literal expectations and a NumPy definition."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.attention import paged_attention, reference, write_rows

pytestmark = pytest.mark.unoptimised

PAGE = 4


def int32(values):
    return jnp.asarray(values, jnp.int32)


def attend_numpy(queries, keys, values, scale):
    """Attention of the last rows of one sequence: queries [n, q_heads, d] are its last n tokens."""
    count, q_heads, _ = queries.shape
    length, kv_heads, _ = keys.shape
    output = np.zeros((count, q_heads, values.shape[2]))
    for row in range(count):
        visible = length - count + row + 1
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            scores = scale * keys[:visible, kv_head] @ queries[row, head]
            weights = np.exp(scores - scores.max())
            output[row, head] = (weights / weights.sum()) @ values[:visible, kv_head]
    return output


def paged_case(
    rng,
    lengths,
    new_tokens,
    *,
    q_heads,
    kv_heads,
    head_dim,
    v_head_dim,
    padding,
    pages_per_sequence=4,
):
    """Sequences of these lengths, whose last `new_tokens` are the batch, in a poisoned pool.

    Returns:
      the arguments of `write_and_attend`, and what it should give.
    """
    pool = len(lengths) * pages_per_sequence + 1
    free = list(rng.permutation(pool))
    page_table = rng.integers(0, pool, (len(lengths), pages_per_sequence))
    k_pages = np.full((pool, kv_heads, PAGE, head_dim), np.nan, np.float32)
    v_pages = np.full((pool, kv_heads, PAGE, v_head_dim), np.nan, np.float32)
    queries, keys, values, sequence_of_token, position, expected = [], [], [], [], [], []
    for sequence, (length, new) in enumerate(zip(lengths, new_tokens, strict=True)):
        all_keys = rng.normal(size=(length, kv_heads, head_dim)).astype(np.float32)
        all_values = rng.normal(size=(length, kv_heads, v_head_dim)).astype(np.float32)
        for place in range(length):
            if place % PAGE == 0:
                page_table[sequence, place // PAGE] = free.pop()
            if place < length - new:
                page = page_table[sequence, place // PAGE]
                k_pages[page, :, place % PAGE] = all_keys[place]
                v_pages[page, :, place % PAGE] = all_values[place]
        new_queries = rng.normal(size=(new, q_heads, head_dim)).astype(np.float32)
        expected.append(attend_numpy(new_queries, all_keys, all_values, 0.3))
        queries.append(new_queries)
        keys.append(all_keys[length - new :])
        values.append(all_values[length - new :])
        sequence_of_token += [sequence] * new
        position += range(length - new, length)
    queries.append(np.full((padding, q_heads, head_dim), np.nan, np.float32))
    keys.append(np.full((padding, kv_heads, head_dim), 7, np.float32))
    values.append(np.full((padding, kv_heads, v_head_dim), 7, np.float32))
    expected.append(np.zeros((padding, q_heads, v_head_dim)))
    batch = (
        int32(page_table),
        int32(sequence_of_token + [0] * padding),
        int32(position + [-1] * padding),
    )
    new_rows = [jnp.asarray(np.concatenate(part)) for part in (queries, keys, values)]
    return jnp.asarray(k_pages), jnp.asarray(v_pages), *new_rows, batch, np.concatenate(expected)


@jax.jit
def write_and_attend(k_pages, v_pages, queries, keys, values, batch):
    k_pages, v_pages = write_rows((k_pages, v_pages), (keys, values), *batch)
    return paged_attention(queries, k_pages, v_pages, *batch, scale=0.3)


class TestWriteRows:
    def test_places(self):
        pages = jnp.zeros((4, 1, PAGE, 1))
        keys = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1)
        # Sequence 0 has the pages 3, 1; sequence 1 has page 0.
        page_table = int32([[3, 1], [0, 9]])
        k_pages, v_pages = write_rows(
            (pages, pages), (keys, -keys), page_table, int32([0, 0, 1, 0]), int32([3, 4, 2, -1])
        )
        expected = [
            [0, 0, 3, 0],
            [2, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 1],
        ]
        np.testing.assert_array_equal(k_pages[:, 0, :, 0], expected)
        np.testing.assert_array_equal(v_pages[:, 0, :, 0], -np.asarray(expected))

    @pytest.mark.parametrize(
        ("page_id", "sequence", "position"),
        [(0, 0, -1), (2, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, PAGE), (0, 0, 2**30)],
    )
    def test_what_has_no_place_is_dropped(self, page_id, sequence, position):
        pages = jnp.zeros((2, 1, PAGE, 2))
        k_pages, v_pages = write_rows(
            (pages, pages),
            (jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2))),
            int32([[page_id]]),
            int32([sequence]),
            int32([position]),
        )
        assert not k_pages.any()
        assert not v_pages.any()

    def test_any_number_of_arrays(self):
        latent = jnp.zeros((2, 1, PAGE, 3), jnp.float8_e4m3fn)
        scales = jnp.zeros((2, 1, PAGE))
        rows = jnp.asarray([1.0, 2.0, 3.0])
        latents = jnp.broadcast_to(rows[:, None, None], (3, 1, 3)).astype(latent.dtype)
        where = (
            jnp.asarray([[1, 0]], jnp.int32),
            jnp.zeros(3, jnp.int32),
            jnp.asarray([0, 5, -1], jnp.int32),
        )
        new_latent, new_scales = write_rows((latent, scales), (latents, rows[:, None]), *where)
        assert new_latent.dtype == jnp.float8_e4m3fn
        expected = [[0, 2, 0, 0], [1, 0, 0, 0]]
        np.testing.assert_array_equal(new_scales[:, 0], expected)
        for element in range(3):
            np.testing.assert_array_equal(new_latent[:, 0, :, element], expected)

    def test_in_place_when_donated(self):
        pages = (jnp.zeros((8, 1, PAGE, 2), jnp.int8), jnp.zeros((8, 1, PAGE)))
        addresses = [array.unsafe_buffer_pointer() for array in pages]
        rows = (jnp.ones((2, 1, 2), jnp.int8), jnp.ones((2, 1)))
        where = (jnp.asarray([[1]]), jnp.asarray([0, 0]), jnp.asarray([1, 2]))
        where = tuple(array.astype(jnp.int32) for array in where)
        written = jax.jit(write_rows, donate_argnums=0)(pages, rows, *where)
        assert [array.unsafe_buffer_pointer() for array in written] == addresses

    def test_rows_of_fp8_go_into_pages_of_their_bits(self):
        pages = (jnp.zeros((1, 1, PAGE), jnp.uint8),)
        rows = (jnp.asarray([[1.0], [-2.0]], jnp.float8_e4m3fn),)
        (written,) = write_rows(pages, rows, int32([[0]]), int32([0, 0]), int32([3, 1]))
        assert written.dtype == jnp.uint8
        np.testing.assert_array_equal(written[0, 0], [0, 0xC0, 0, 0x38])

    @pytest.mark.parametrize(
        ("pages", "rows", "message"),
        [
            ((), (), "0 arrays of pages and 0 of rows"),
            ((jnp.zeros((2, 1, 4)),), (), "1 arrays of pages and 0 of rows"),
            ((jnp.zeros((2, 1, 4)),), (jnp.zeros((1, 2)),), r"rows\[0\] has shape \(1, 2\)"),
            ((jnp.zeros((2, 4)),), (jnp.zeros((1, 2)),), r"pages of rows\[0\] are float32\(2, 4\)"),
            (
                (jnp.zeros((2, 1, 4)), jnp.zeros((3, 1, 4))),
                (jnp.zeros((1, 1)), jnp.zeros((1, 1))),
                r"pages\[1\] has \[pages, kv_heads, page_size\] \(3, 1, 4\), pages\[0\] has",
            ),
            (
                (jnp.zeros((2, 1, 4)), jnp.zeros((2, 1, 4), jnp.int8)),
                (jnp.zeros((1, 1)), jnp.zeros((1, 1))),
                r"rows\[1\] is float32, its pages are int8",
            ),
        ],
    )
    def test_bad_calls(self, pages, rows, message):
        where = (jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(write_rows)(pages, rows, *where)


class TestPagedAttention:
    def test_literal(self):
        # One head of size 1 and scores ln 1, ln 3: the second position counts three times.
        k_pages = jnp.asarray([0.0, np.log(3.0), 50.0, 50.0]).reshape(1, 1, PAGE, 1)
        v_pages = jnp.asarray([[1.0, 0.0], [5.0, 1.0], [9.0, 9.0], [9.0, 9.0]]).reshape(
            1, 1, PAGE, 2
        )
        output = paged_attention(
            jnp.ones((3, 1, 1)),
            k_pages,
            v_pages,
            int32([[0]]),
            int32([0, 0, 0]),
            int32([0, 1, -1]),
            scale=1.0,
        )
        np.testing.assert_allclose(output[:, 0], [[1, 0], [4, 0.75], [0, 0]], rtol=1e-6)

    @pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
    @pytest.mark.parametrize("chunk", ["decode", "prefill"])
    def test_lengths_around_a_page(self, length, chunk):
        case = paged_case(
            np.random.default_rng(length),
            [length],
            [1 if chunk == "decode" else length],
            q_heads=4,
            kv_heads=1,
            head_dim=8,
            v_head_dim=6,
            padding=2,
        )
        np.testing.assert_allclose(write_and_attend(*case[:-1]), case[-1], rtol=1e-4, atol=1e-5)

    @given(data=st.data())
    def test_ragged_batches(self, data):
        """Always four sequences and 64 tokens with padding, so that few programs are compiled."""
        lengths = data.draw(st.lists(st.integers(0, 4 * PAGE), min_size=4, max_size=4))
        new_tokens = [data.draw(st.integers(0, min(15, length))) for length in lengths]
        q_heads, kv_heads, v_head_dim = data.draw(st.sampled_from([(4, 1, 8), (6, 2, 4)]))
        case = paged_case(
            np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))),
            lengths,
            new_tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=8,
            v_head_dim=v_head_dim,
            padding=64 - sum(new_tokens),
        )
        np.testing.assert_allclose(write_and_attend(*case[:-1]), case[-1], rtol=1e-4, atol=1e-5)

    def test_blocks_of_tokens_change_nothing(self, monkeypatch):
        shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "padding": 2}
        case = paged_case(np.random.default_rng(0), [11, 5], [7, 4], **shape)
        # 128 positions of 16 FP32 numbers a row: room for three tokens, so that 13 tokens are four
        # blocks and a remainder; then room for none.
        for room in (3 * 128 * 16 * 4, 1):
            monkeypatch.setattr(reference, "GATHERED_BYTES", room)
            output = write_and_attend.__wrapped__(*case[:-1])
            np.testing.assert_allclose(output, case[-1], rtol=1e-4, atol=1e-5)

    def test_bfloat16_pages_and_queries(self):
        shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "padding": 1}
        *arrays, batch, expected = paged_case(np.random.default_rng(3), [9], [3], **shape)
        output = write_and_attend(*(array.astype(jnp.bfloat16) for array in arrays), batch)
        assert output.dtype == jnp.bfloat16
        np.testing.assert_allclose(output.astype(jnp.float32), expected, rtol=0.05, atol=0.05)

    def test_large_scores_do_not_overflow(self):
        pages = jnp.full((1, 1, PAGE, 1), 1e4)
        output = paged_attention(
            jnp.full((1, 1, 1), 1e4), pages, pages, int32([[0]]), int32([0]), int32([2]), scale=1.0
        )
        np.testing.assert_allclose(output, [[[1e4]]], rtol=1e-6)

    def test_inside_shard_map(self):
        """One page pool for each of two groups, one query head on each of two devices."""
        shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "padding": 1}
        cases = [
            paged_case(np.random.default_rng(seed), [9, 6], [3, 1], **shape) for seed in (1, 2)
        ]
        arrays = [jnp.concatenate([case[index] for case in cases]) for index in range(5)]
        batch = tuple(jnp.concatenate([case[5][index] for case in cases]) for index in range(3))
        if len(jax.devices()) < 4:
            pytest.skip("needs 4 devices")
        mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
        group, heads = PartitionSpec("dp"), PartitionSpec("dp", "tp")
        sharded = jax.shard_map(
            write_and_attend.__wrapped__,
            mesh=mesh,
            in_specs=(group, group, heads, group, group, group),
            out_specs=heads,
        )
        expected = np.concatenate([case[6] for case in cases])
        np.testing.assert_allclose(jax.jit(sharded)(*arrays, batch), expected, rtol=1e-4, atol=1e-5)


class TestBadCalls:
    """What users see, who do not run with the annotations checked: `unwrap` removes that check."""

    def good(self):
        return {
            "k_pages": jnp.zeros((2, 2, PAGE, 8)),
            "v_pages": jnp.zeros((2, 2, PAGE, 6)),
            "page_table": jnp.zeros((1, 2), jnp.int32),
            "sequence_of_token": jnp.zeros(3, jnp.int32),
            "position": jnp.zeros(3, jnp.int32),
        }

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("queries", jnp.zeros((3, 3, 8)), "3 query heads are not a multiple of 2"),
            ("queries", jnp.zeros((3, 4, 7)), "head_dim 7, k_pages has 8"),
            ("queries", jnp.zeros((3, 4, 8), jnp.int32), r"int32\(3, 4, 8\)"),
            ("v_pages", jnp.zeros((3, 2, PAGE, 6)), r"\(2, 2, 4\), v_pages has \(3, 2, 4\)"),
            ("page_table", jnp.zeros((1, 2), jnp.uint32), r"page_table is uint32\(1, 2\)"),
            ("page_table", jnp.zeros((1, 0), jnp.int32), r"page_table is empty: \(1, 0\)"),
            ("rope_pages", jnp.zeros((2, 2, PAGE, 3)), "there are rope_pages and v_pages"),
            ("position", jnp.zeros(4, jnp.int32), "position has 4 entries for 3 tokens"),
        ],
    )
    def test_paged_attention(self, field, value, message):
        arguments = self.good() | {"queries": jnp.zeros((3, 4, 8)), field: value}
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(paged_attention)(**arguments, scale=1.0)

"""`paged_attention` with its options, and `merge`, against a NumPy definition."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.attention import merge, paged_attention, reference, write_rows
from pallas_kernels.quantize import quantize_rows

PAGE, PAGES_PER_SEQUENCE, TOKENS, SEQUENCES, SCALE = 4, 5, 24, 3, 0.3
STORAGE = {"float32": np.float32, "fp8": jnp.float8_e4m3fn, "int8": np.int8, "fp8 bits": np.uint8}


class Options(NamedTuple):
    """Of one case."""

    window: int = 0
    shared: bool = False
    """Values are the first elements of the keys."""
    keys: str = "float32"
    values: str = "float32"
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_width: int = 6


class Case(NamedTuple):
    """The cache of several sequences before a step, and the step."""

    pages: tuple
    """Keys, values (not if shared), then the scales of those that have them; poisoned."""
    rows: tuple
    """What the step writes into each of them."""
    queries: jax.Array
    where: tuple
    output: np.ndarray
    """What it should give, float64."""
    lse: np.ndarray


def attend_numpy(query, keys, values, last, options):
    """One token at position `last` over its sequence's keys and values [length, kv_heads, _]."""
    first = max(0, last - options.window + 1) if options.window else 0
    visible = slice(first, last + 1)
    output, lse = np.zeros((options.q_heads, options.v_width)), np.zeros(options.q_heads)
    for head in range(options.q_heads):
        kv_head = head // (options.q_heads // options.kv_heads)
        scores = SCALE * keys[visible, kv_head].astype(np.float64) @ query[head]
        weights = np.exp(scores - scores.max())
        output[head] = weights @ values[visible, kv_head] / weights.sum()
        lse[head] = scores.max() + np.log(weights.sum())
    return output, lse


def stored(rng, length, width, options, format):
    """Random rows as the cache holds them: what is written, its scales, and what they stand for."""
    # Always as many, so that few programs are compiled.
    rows = rng.normal(size=(PAGE * PAGES_PER_SEQUENCE, options.kv_heads, width)).astype(np.float32)
    if format == "float32":
        return rows[:length], None, rows[:length]
    values, scales = quantize_rows(jnp.asarray(rows.reshape(-1, width)), format[:4].rstrip())
    values = np.asarray(values).reshape(rows.shape)[:length]
    scales = np.asarray(scales).reshape(rows.shape[:2])[:length]
    meaning = values.astype(np.float64) * scales[..., None]
    return values.view(STORAGE[format]), scales, meaning


def poison(shape, dtype):
    """NaN, also as the bits of float8_e4m3fn; INT8 has none, but its scales have."""
    integers = np.dtype(dtype).kind in "iu"
    return np.full(shape, 0x7F if integers else np.nan).astype(dtype)


def make_case(rng, lengths, new_tokens, options):
    """Sequences of these lengths, of which the last `new_tokens` are the step's; then padding."""
    pool = SEQUENCES * PAGES_PER_SEQUENCE + 1
    free = list(rng.permutation(pool))
    page_table = rng.integers(0, pool, (SEQUENCES, PAGES_PER_SEQUENCE))
    parts = [(options.head_dim, options.keys)]
    if not options.shared:
        parts.append((options.v_width, options.values))
    dtypes = [STORAGE[format] for _, format in parts]
    shapes = [(options.kv_heads, width) for width, _ in parts]
    scaled = [index for index, (_, format) in enumerate(parts) if format != "float32"]
    dtypes += [np.float32] * len(scaled)
    shapes += [(options.kv_heads,)] * len(scaled)
    pages = [poison((pool, s[0], PAGE, *s[1:]), d) for s, d in zip(shapes, dtypes, strict=True)]
    rows = [poison((TOKENS, *s), d) for s, d in zip(shapes, dtypes, strict=True)]
    queries = np.full((TOKENS, options.q_heads, options.head_dim), np.nan, np.float32)
    output = np.zeros((TOKENS, options.q_heads, options.v_width))
    lse = np.full((TOKENS, options.q_heads), -np.inf)
    sequence_of_token, position = np.zeros(TOKENS, int), np.full(TOKENS, -1)
    token = 0
    for sequence, (length, new) in enumerate(zip(lengths, new_tokens, strict=True)):
        stores = [stored(rng, length, width, options, format) for width, format in parts]
        arrays = [store[0] for store in stores] + [stores[index][1] for index in scaled]
        meaning = [store[2] for store in stores]
        values = meaning[0][..., : options.v_width] if options.shared else meaning[1]
        for place in range(length):
            if place % PAGE == 0:
                page_table[sequence, place // PAGE] = free.pop()
            page = page_table[sequence, place // PAGE]
            if place < length - new:
                for array, pool_array in zip(arrays, pages, strict=True):
                    pool_array[page, :, place % PAGE] = array[place]
                continue
            for array, row in zip(arrays, rows, strict=True):
                row[token] = array[place]
            queries[token] = rng.normal(size=queries.shape[1:])
            sequence_of_token[token], position[token] = sequence, place
            output[token], lse[token] = attend_numpy(
                queries[token], meaning[0], values, place, options
            )
            token += 1
    where = tuple(jnp.asarray(x, jnp.int32) for x in (page_table, sequence_of_token, position))
    return Case(
        tuple(jnp.asarray(x) for x in pages),
        tuple(jnp.asarray(x) for x in rows),
        jnp.asarray(queries),
        where,
        output,
        lse,
    )


def write_and_attend(pages, rows, queries, where, options):
    """The step of a case: (output, lse)."""
    arrays = list(write_rows(pages, rows, *where))
    k_pages = arrays.pop(0)
    v_pages = None if options.shared else arrays.pop(0)
    k_scales = arrays.pop(0) if options.keys != "float32" else None
    v_scales = arrays.pop(0) if arrays else None
    return paged_attention(
        queries,
        k_pages,
        v_pages,
        *where,
        scale=SCALE,
        window=options.window,
        v_width=options.v_width if options.shared else 0,
        k_scales=k_scales,
        v_scales=v_scales,
        with_lse=True,
    )


compiled = jax.jit(write_and_attend, static_argnums=4)


def check(case, options, function=compiled):
    output, lse = function(case.pages, case.rows, case.queries, case.where, options)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(output, case.output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, case.lse, rtol=1e-4, atol=1e-5)


COMBINATIONS = [
    Options(),
    Options(window=1),
    Options(window=PAGE),
    Options(window=PAGE + 1),
    Options(window=PAGE + 2),
    Options(window=3 * PAGE),
    Options(window=100),
    Options(shared=True, kv_heads=1),
    Options(keys="fp8", values="fp8"),
    Options(keys="int8", values="int8"),
    Options(keys="fp8", values="float32", window=3),
    Options(keys="float32", values="int8"),
    Options(shared=True, keys="int8", kv_heads=1, window=6),
    Options(shared=True, keys="fp8", v_width=8),
    Options(keys="fp8 bits", values="fp8 bits"),
]


@pytest.mark.parametrize("options", COMBINATIONS)
@settings(max_examples=15)
@given(data=st.data())
def test_ragged_batches(options, data):
    """Always three sequences and 24 tokens with padding, so that few programs are compiled."""
    longest = PAGE * PAGES_PER_SEQUENCE
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=SEQUENCES, max_size=SEQUENCES))
    new_tokens = [data.draw(st.integers(0, min(8, length))) for length in lengths]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check(make_case(rng, lengths, new_tokens, options), options)


@pytest.mark.parametrize(
    "options", [Options(window=6, keys="int8", values="fp8"), Options(shared=True, keys="fp8")]
)
def test_blocks_of_tokens_change_nothing(options, monkeypatch):
    monkeypatch.setattr(reference, "GATHERED_BYTES", 5000)
    case = make_case(np.random.default_rng(0), [20, 7, 13], [8, 7, 3], options)
    check(case, options, write_and_attend)


def test_window_literal():
    """Scores are equal, so that the output is the mean of what is visible."""
    v_pages = jnp.asarray([[1.0, 2, 4, 8], [16, 32, 64, jnp.nan]]).reshape(2, 1, PAGE, 1)
    k_pages = jnp.zeros_like(v_pages)
    output, lse = paged_attention(
        jnp.ones((4, 1, 1)),
        k_pages,
        v_pages,
        jnp.asarray([[0, 1]], jnp.int32),
        jnp.zeros(4, jnp.int32),
        jnp.asarray([0, 1, 4, 6], jnp.int32),
        scale=1.0,
        window=2,
        with_lse=True,
    )
    np.testing.assert_allclose(output[:, 0, 0], [1, 1.5, 12, 48], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log([1, 2, 2, 2]), atol=1e-6)


def test_window_reads_its_pages_only():
    """A page that has slid out of the window may be anything, also another sequence's NaNs."""
    options = Options(window=PAGE)
    case = make_case(np.random.default_rng(0), [20, 0, 0], [2, 0, 0], options)
    page_table = np.asarray(case.where[0]).copy()
    poisoned = [np.asarray(array).copy() for array in case.pages]
    for array in poisoned:
        array[page_table[0, :3]] = np.nan
    pages = tuple(jnp.asarray(array) for array in poisoned)
    check(case._replace(pages=pages), options)


def test_latent_cache_of_deepseek():
    """Absorbed latent attention: one key of 576 elements, its first 512 are the value."""
    options = Options(shared=True, q_heads=3, kv_heads=1, head_dim=576, v_width=512)
    check(make_case(np.random.default_rng(0), [9, 4, 0], [2, 1, 0], options), options)


def test_bfloat16_queries_give_bfloat16():
    options = Options(keys="fp8", values="fp8")
    case = make_case(np.random.default_rng(0), [9, 4, 0], [2, 1, 0], options)
    queries = case.queries.astype(jnp.bfloat16)
    output, lse = compiled(case.pages, case.rows, queries, case.where, options)
    assert output.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(output.astype(jnp.float32), case.output, rtol=0.05, atol=0.05)


def test_inside_shard_map():
    """Two groups with a cache each, the key/value heads on two devices."""
    options = Options(window=6, keys="int8", values="int8")
    local = options._replace(q_heads=2, kv_heads=1)
    cases = [
        make_case(np.random.default_rng(seed), [9, 6, 0], [3, 1, 0], options) for seed in (1, 2)
    ]
    pages, rows, queries, where = jax.tree.map(
        lambda *parts: jnp.concatenate(parts), *(case[:4] for case in cases)
    )
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    heads = PartitionSpec("dp", "tp")
    sharded = jax.shard_map(
        lambda *arguments: write_and_attend(*arguments, local),
        mesh=mesh,
        in_specs=(heads, heads, heads, PartitionSpec("dp")),
        out_specs=heads,
    )
    output, lse = jax.jit(sharded)(pages, rows, queries, where)
    expected = np.concatenate([case.output for case in cases])
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, np.concatenate([case.lse for case in cases]), 1e-4, 1e-5)


class TestMerge:
    def test_literal(self):
        """Sums of exponentials 1 and 3: a quarter and three quarters."""
        outputs = [jnp.full((1, 1, 1), 8.0), jnp.full((1, 1, 1), 4.0)]
        lses = [jnp.zeros((1, 1)), jnp.full((1, 1), np.log(3.0))]
        np.testing.assert_allclose(merge(outputs, lses), [[[5.0]]], rtol=1e-6)

    def test_parts_that_saw_nothing(self):
        outputs = [jnp.full((2, 1, 1), jnp.nan), jnp.asarray([[[7.0]], [[jnp.nan]]])]
        lses = [jnp.full((2, 1), -jnp.inf), jnp.asarray([[500.0], [-jnp.inf]])]
        np.testing.assert_array_equal(merge(outputs, lses), [[[7.0]], [[0.0]]])

    @settings(max_examples=15)
    @given(data=st.data())
    def test_cut_anywhere(self, data):
        """The positions before a cut and those after it, as two sequences, merge into all."""
        lengths = [data.draw(st.integers(1, PAGE * PAGES_PER_SEQUENCE)), 0, 0]
        options, rng = Options(), np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        case = make_case(rng, lengths, [1, 0, 0], options)
        pages = write_rows(case.pages, case.rows, *case.where)
        table, sequence, position = (np.asarray(array).copy() for array in case.where)
        last_page = position[0] // PAGE
        cut = data.draw(st.integers(0, last_page))  # in whole pages
        table[1, : PAGES_PER_SEQUENCE - cut] = table[0, cut:]
        parts = []
        for row, last in ((0, cut * PAGE - 1), (1, position[0] - cut * PAGE)):
            sequence[0], position[0] = row, last
            where = (jnp.asarray(table), jnp.asarray(sequence), jnp.asarray(position))
            parts.append(attend_with_lse(case.queries, *pages, *where))
        outputs, lses = zip(*parts, strict=True)
        np.testing.assert_allclose(merge(outputs, lses), case.output, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("outputs", "lses", "message"),
        [
            ([], [], "0 outputs and 0 lses"),
            ([jnp.zeros((2, 3, 4))], [], "1 outputs and 0 lses"),
            ([jnp.zeros((2, 3, 4))], [jnp.zeros((2, 4))], r"lses\[0\] \(2, 4\)"),
            (
                [jnp.zeros((2, 3, 4)), jnp.zeros((2, 3, 5))],
                [jnp.zeros((2, 3))] * 2,
                r"outputs\[1\] has shape \(2, 3, 5\)",
            ),
        ],
    )
    def test_bad_calls(self, outputs, lses, message):
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(merge)(outputs, lses)


@jax.jit
def attend_with_lse(queries, k_pages, v_pages, *where):
    return paged_attention(queries, k_pages, v_pages, *where, scale=SCALE, with_lse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "window is -1"),
        ({"v_width": 2}, "v_width is 2, which is for v_pages None"),
        ({"v_pages": None}, "v_width is 0, needs 1 to 8"),
        ({"v_pages": None, "v_width": 9}, "v_width is 9, needs 1 to 8"),
        ({"v_pages": None, "v_width": 4, "v_scales": jnp.ones((2, 2, PAGE))}, "no v_pages"),
        ({"k_scales": jnp.ones((2, 2, PAGE))}, "k_pages is float32, which has no scales"),
        (
            {"k_pages": jnp.zeros((2, 2, PAGE, 8), jnp.int8)},
            r"k_pages is int8, k_scales is None, needs float32\(2, 2, 4\)",
        ),
        (
            {
                "v_pages": jnp.zeros((2, 2, PAGE, 6), jnp.float8_e4m3fn),
                "v_scales": jnp.ones((2, 2, PAGE, 1)),
            },
            r"v_scales is float32\(2, 2, 4, 1\), needs float32\(2, 2, 4\)",
        ),
        ({"k_pages": jnp.zeros((2, 2, PAGE, 8), jnp.int32)}, r"k_pages is int32\(2, 2, 4, 8\)"),
    ],
)
def test_bad_calls(change, message):
    """What users see, who do not run with the annotations checked: `unwrap` removes that check."""
    good = {
        "queries": jnp.zeros((3, 4, 8)),
        "k_pages": jnp.zeros((2, 2, PAGE, 8)),
        "v_pages": jnp.zeros((2, 2, PAGE, 6)),
        "page_table": jnp.zeros((1, 2), jnp.int32),
        "sequence_of_token": jnp.zeros(3, jnp.int32),
        "position": jnp.zeros(3, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(paged_attention)(**(good | change), scale=1.0)

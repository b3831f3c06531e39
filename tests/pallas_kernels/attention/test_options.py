"""`paged_attention` with its options, and `merge`, against the suite's definition in NumPy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.attention import merge, paged_attention
from tests.pallas_kernels.attention.suite import PADDING, SCALE, Sizes, make_case

PAGE, PAGES_PER_SEQUENCE, TOKENS = 4, 5, 24
SEEDS = st.integers(0, 2**32 - 1)
SIZES = Sizes(kv_heads=2, head_dim=8, v_width=6)
LATENT = SIZES._replace(kv_heads=1, shared=True)


def make(sizes, chunks, seed=0):
    return make_case(
        sizes, chunks, page_size=PAGE, pages_per_sequence=PAGES_PER_SEQUENCE, seed=seed
    )


@functools.cache
def compiled(sizes):
    """The call with the options of cases of these sizes, their scales as the last arguments."""

    def attend(*arguments):
        *arguments, scales = arguments
        fixed = {"window": sizes.window, "v_width": sizes.v_width if sizes.shared else 0}
        return paged_attention(*arguments, scale=SCALE, with_lse=True, **fixed, **scales)

    return jax.jit(attend)


def run(case, sizes):
    scales = {name: case.options[name] for name in ("k_scales", "v_scales")}
    return compiled(sizes)(*case.arguments, scales)


def check(case, sizes):
    output, lse = run(case, sizes)
    np.testing.assert_allclose(output, case.output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, case.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        *(SIZES._replace(window=window) for window in (1, PAGE, PAGE + 1, 100)),
        LATENT,
        *(SIZES._replace(cache=cache) for cache in ("e4m3", "fp8", "int8")),
        SIZES._replace(cache="e4m3", values="float32", window=3),
        SIZES._replace(cache="float32", values="int8"),
        LATENT._replace(cache="int8", window=6),
        LATENT._replace(kv_heads=2, cache="e4m3", v_width=8),
    ],
)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, PAGE * PAGES_PER_SEQUENCE), min_size=3, max_size=3),
    new=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    seed=SEEDS,
)
def test_ragged_batches(sizes, lengths, new, seed):
    """Always three sequences and 24 tokens with padding, so that few programs are compiled."""
    chunks = [(length, min(length, most)) for length, most in zip(lengths, new, strict=True)]
    padding = TOKENS - sum(count for _, count in chunks)
    check(make(sizes, [*chunks, *[PADDING] * padding], seed), sizes)


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
    sizes = SIZES._replace(window=PAGE)
    case = make(sizes, [(20, 2)])
    queries, *pages, table, sequence, position = case.arguments
    pages = [array.at[table[0, :3]].set(jnp.nan) for array in pages]
    check(case._replace(arguments=(queries, *pages, table, sequence, position)), sizes)


def test_inside_shard_map():
    """Two groups with a cache each, the key/value heads on two devices."""
    sizes = SIZES._replace(window=6, cache="int8")
    cases = [make(sizes, [(9, 3), (6, 1)], seed) for seed in (1, 2)]
    arguments, options = jax.tree.map(
        lambda *parts: jnp.concatenate(parts),
        *((case.arguments, (case.options["k_scales"], case.options["v_scales"])) for case in cases),
    )
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    heads, group = PartitionSpec("dp", "tp"), PartitionSpec("dp")

    def attend(arguments, scales):
        scales = dict(zip(("k_scales", "v_scales"), scales, strict=True))
        return compiled(sizes).__wrapped__(*arguments, scales)

    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=((heads, heads, heads, group, group, group), (heads, heads)),
        out_specs=heads,
    )
    output, lse = jax.jit(mapped)(arguments, options)
    for found, name in ((output, "output"), (lse, "lse")):
        expected = np.concatenate([getattr(case, name) for case in cases])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@jax.jit
def attend_with_lse(queries, k_pages, v_pages, *where):
    return paged_attention(queries, k_pages, v_pages, *where, scale=SCALE, with_lse=True)


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
    @given(length=st.integers(1, PAGE * PAGES_PER_SEQUENCE), seed=SEEDS, data=st.data())
    def test_cut_anywhere(self, length, seed, data):
        """The positions before a cut and those after it, as two sequences, merge into all."""
        case = make(SIZES, [(length, 1), (1, 0)], seed)
        queries, *pages, table, _, _ = case.arguments
        cut = data.draw(st.integers(0, (length - 1) // PAGE))  # in whole pages
        table = np.asarray(table).copy()
        table[1, : PAGES_PER_SEQUENCE - cut] = table[0, cut:]
        parts = []
        for row, last in ((0, cut * PAGE - 1), (1, length - 1 - cut * PAGE)):
            where = (jnp.asarray(array, jnp.int32) for array in (table, [row], [last]))
            parts.append(attend_with_lse(queries, *pages, *where))
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
        ({"queries": jnp.zeros((3, 3, 8))}, "3 query heads are not a multiple of 2"),
        ({"queries": jnp.zeros((3, 4, 7))}, "head_dim 7, k_pages has 8"),
        ({"queries": jnp.zeros((3, 4, 8), jnp.int32)}, r"int32\(3, 4, 8\)"),
        ({"v_pages": jnp.zeros((3, 2, PAGE, 6))}, r"\(2, 2, 4\), v_pages has \(3, 2, 4\)"),
        ({"page_table": jnp.zeros((1, 2), jnp.uint32)}, r"page_table is uint32\(1, 2\)"),
        ({"page_table": jnp.zeros((1, 0), jnp.int32)}, r"page_table is empty: \(1, 0\)"),
        ({"rope_pages": jnp.zeros((2, 2, PAGE, 3))}, "there are rope_pages and v_pages"),
        ({"position": jnp.zeros(4, jnp.int32)}, "position has 4 entries for 3 tokens"),
    ],
)
def test_bad_calls(change, message):
    """The errors that users see: `unwrap` removes the check of annotations."""
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

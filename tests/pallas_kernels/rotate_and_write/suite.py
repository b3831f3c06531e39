"""Tests of every backend of `rotate_and_write`, against NumPy; subclasses say which one.

Pages hold something wherever nothing is written, which stays there.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.attention.two_terms import TwoTerms
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.target import use_target
from tests import golden
from tests.pallas_kernels.norm_quantize.suite import norm_numpy
from tests.pallas_kernels.quantize.definition import LARGEST

PAGE_SIZE, POOL = 8, 6
TABLE = np.asarray([[4, 1, POOL, -1], [0, 5, 2, 3]], np.int32)
SEQUENCES = np.asarray([0, 1, -1, 0, 1, 1, 2, 0], np.int32)
POSITIONS = np.asarray([3, 23, 10, 20, -1, 32, 1, 28], np.int32)
PLACES = {0: (4, 3), 1: (2, 7)}
"""Page and row of each token: of the others the sequence, page, position, position, sequence or
page is outside, on either side. The nearest place that there is, is another page's."""


class Case(NamedTuple):
    """A call, what it should give and by how much of its largest it may miss."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    query: np.ndarray
    rows: tuple[np.ndarray, np.ndarray]
    pages: tuple[np.ndarray, ...]


def changed(case, names, name, change):
    """The case with one argument, by its place among `names`, or one option changed."""
    if name in case.options:
        return case._replace(options=case.options | {name: change(case.options[name])})
    arguments, place = list(case.arguments), names.index(name)
    arguments[place] = change(arguments[place])
    return case._replace(arguments=tuple(arguments))


def turned(low, high, angles, dtype):
    """The halves of pairs, turned in float64."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    c, s = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(dtype)


def near(cache):
    """Relative error that a number may have."""
    return {"fp8": 2**-3, "int8": 2e-2}.get(cache, 2**-6)


def meant(kept, scales, rows, cache):
    """Values of rows kept in 8 bits; their scales are checked."""
    kept = kept.view(ml_dtypes.float8_e4m3fn) if cache == "fp8" else kept
    largest = np.abs(rows.astype(np.float32)).max(axis=-1)
    np.testing.assert_allclose(scales, largest / LARGEST[cache], rtol=2e-2)
    assert np.abs(kept.astype(np.float32)).max() == LARGEST[cache]
    return kept.astype(np.float32) * scales[..., None]


def make_case(
    cache, *, width=128, q_heads=16, kv_heads=1, normed=False, joined=False, dtype=jnp.bfloat16
):
    """Eight tokens."""
    rng, tokens = np.random.default_rng(width + kv_heads), len(SEQUENCES)

    def random(*shape):
        return rng.normal(size=shape).astype(dtype)

    places = (POOL, kv_heads, PAGE_SIZE)
    pages = [random(*places, width) for _ in range(2)]
    if cache in LARGEST:
        kept = np.uint8 if cache == "fp8" else np.int8
        pages = [rng.integers(0, 99, page.shape).astype(kept) for page in pages]
        pages += [rng.normal(size=places).astype(np.float32) for _ in range(2)]
    heads = [random(tokens, count, width) for count in (q_heads, kv_heads, kv_heads)]
    norms = {name: random(width) for name in ("query_norm", "key_norm")} if normed else {}
    angles = rng.normal(size=(tokens, width // 2)) * 9
    query, key = heads[:2]
    if norms:
        query = norm_numpy(query, norms["query_norm"], 1e-6)
        key = norm_numpy(key, norms["key_norm"], 1e-6)
    query, key = (turned(*np.split(x, 2, axis=-1), angles[:, None], dtype) for x in (query, key))
    turn = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    where = map(jnp.asarray, (TABLE, SEQUENCES, POSITIONS))
    arguments = (tuple(map(jnp.asarray, pages)), *map(jnp.asarray, heads), *turn, *where)
    options = {name: jnp.asarray(norm) for name, norm in norms.items()} | {"epsilon": 1e-6}
    if joined:
        columns = [random(tokens, 2 * width), *(x.reshape(tokens, -1) for x in heads[1:])]
        options["joined"] = jnp.asarray(np.concatenate(columns, axis=1))
    return Case(arguments, options, query, (key, heads[2]), tuple(pages))


def check(case, queries, written, cache):
    """Nothing else is written; what is, stands for the rows."""
    queries = queries.whole() if isinstance(queries, TwoTerms) else queries
    np.testing.assert_allclose(
        np.asarray(queries, np.float32), case.query.astype(np.float32), rtol=2**-6, atol=2e-2
    )
    for index, (rows, array, before) in enumerate(
        zip(case.rows, written, case.pages, strict=False)
    ):
        array = np.array(array)
        for token, (page, row) in PLACES.items():
            kept = array[page, :, row]
            if cache in LARGEST:
                kept = meant(kept, np.asarray(written[2 + index])[page, :, row], rows[token], cache)
            kept, expected = kept.astype(np.float32), rows[token].astype(np.float32)
            np.testing.assert_allclose(kept, expected, rtol=near(cache), atol=3e-2)
            array[page, :, row] = before[page, :, row]
        np.testing.assert_array_equal(array, before)


class Suite:
    """Runs cases of an operation on a target."""

    target = None
    operation: Callable[..., Any]

    def run(self, case, **options):
        function = functools.partial(self.operation, **case.options, **options)
        with use_target(self.target):
            return jax.jit(function)(*case.arguments)


class RotateAndWriteSuite(Suite):
    """Eight tokens of few heads, since interpreting is slow."""

    operation = staticmethod(rotate_and_write)

    @golden.table("pallas_kernels/written_caches.yaml")
    def test_against_numpy(self, cache, sizes):
        case = make_case(cache, **sizes)
        check(case, *self.run(case), cache)

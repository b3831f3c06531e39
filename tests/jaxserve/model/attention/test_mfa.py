"""MFA alone, against NumPy: several ragged sequences at once, whole and in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.step3 import step3_config
from jaxserve.config.model import LayerKind
from jaxserve.model.attention.batch import RaggedBatch
from jaxserve.model.attention.mfa import MFA
from jaxserve.model.module import Formats, Rngs
from tests.reference.step3_numpy import Cache, Step3Numpy
from tests.reference.tiny_step3 import TinyStep3

pytestmark = pytest.mark.unoptimised

SIZES = TinyStep3(num_hidden_layers=1, moe_layers=())
CONFIG = step3_config(SIZES.config())
SHAPE = CONFIG.attention
PAGE_SIZE, PAGES = 4, 12
PAGE_TABLE = [[3, 7, 1], [9, 0, 5], [2, 11, 4]]
"""Three sequences on pages that do not lie in order."""


@pytest.fixture(scope="module")
def tensors():
    return SIZES.tensors(seed=3)


@pytest.fixture(scope="module")
def numpy_model(tensors):
    return Step3Numpy(SIZES.config(), {k: v.astype(np.float64) for k, v in tensors.items()})


def module(tensors, dtype=jnp.float32, heads=slice(None)) -> MFA:
    """The layer, or the share of a device that has some of the query heads."""
    name = "model.layers.0.self_attn."
    get = lambda part: tensors[f"{name}{part}.weight"]  # noqa: E731
    rows = np.arange(SHAPE.q_heads * SHAPE.head_dim).reshape(SHAPE.q_heads, -1)[heads].ravel()
    mfa = MFA(CONFIG, SHAPE, LayerKind("dense"), Formats(jnp.dtype(dtype)), Rngs(0))
    down = np.concatenate([get("q_proj"), get("k_proj"), get("v_proj")])
    for weight, value in (
        (mfa.down, down),
        (mfa.inter_norm, get("inter_norm")),
        (mfa.up, get("wq")[rows]),
        (mfa.out, get("o_proj")[:, rows]),
    ):
        weight.value = jnp.asarray(value, dtype)
    return mfa


def empty_pages(dtype=jnp.float32):
    shape = (PAGES, 1, PAGE_SIZE, SHAPE.head_dim)
    return jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype)


def step(mfa, rows, pages, padding=0):
    """`rows`: (sequence, first position, x) of every sequence in the step."""
    x = np.concatenate([row[2] for row in rows] + [np.full((padding, CONFIG.d_model), 7.0)])
    sequence = np.concatenate([np.full(len(x), s) for s, _, x in rows] + [np.full(padding, 2)])
    position = np.concatenate(
        [start + np.arange(len(x)) for _, start, x in rows] + [np.full(padding, -1)]
    )
    batch = RaggedBatch(
        jnp.asarray(sequence, jnp.int32),
        jnp.asarray(position, jnp.int32),
        jnp.asarray(PAGE_TABLE, jnp.int32),
        jnp.zeros(len(x), jnp.int32),  # of no use here
    )
    out, pages = jax.jit(mfa.__call__)(jnp.asarray(x, mfa.down[...].dtype), pages, batch)
    ends = np.cumsum([len(x) for _, _, x in rows])
    return np.split(np.asarray(out[: ends[-1]]), ends[:-1]), pages


@functools.cache
def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, CONFIG.d_model)).astype(np.float32) for length in (9, 1, 12)]


@pytest.fixture(scope="module")
def expected(numpy_model):
    return [numpy_model.attention(0, x.astype(np.float64), Cache()) for x in inputs()]


def test_three_sequences_at_once(tensors, expected):
    rows = [(s, 0, x) for s, x in enumerate(inputs())]
    got, _ = step(module(tensors), rows, empty_pages())
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_in_chunks_and_token_by_token(tensors, expected):
    mfa, (a, b, c) = module(tensors), inputs()
    steps = [
        [(0, 0, a[:5])],
        [(2, 0, c[:3]), (0, 5, a[5:6])],  # a chunk beside a decode token
        [(0, 6, a[6:7]), (1, 0, b), (2, 3, c[3:11])],
        [(0, 7, a[7:]), (2, 11, c[11:])],
    ]
    pages, parts = empty_pages(), {0: [], 1: [], 2: []}
    for number, rows in enumerate(steps):
        outputs, pages = step(mfa, rows, pages, padding=number)
        for (sequence, _, _), output in zip(rows, outputs, strict=True):
            parts[sequence].append(output)
    for sequence, theirs in enumerate(expected):
        np.testing.assert_allclose(np.concatenate(parts[sequence]), theirs, atol=2e-5)


def test_padding_writes_no_page(tensors):
    _, (k, v) = step(module(tensors), [(1, 0, inputs()[1])], empty_pages(), padding=3)
    for pages in (k, v):
        written = np.argwhere(~np.isnan(np.asarray(pages)[:, 0, :, 0]))
        assert written.tolist() == [[9, 0]]


def test_shares_of_the_heads_add_up(tensors, expected):
    """tp 2: each device has half of the query heads, and all of K and V."""
    rows = [(s, 0, x) for s, x in enumerate(inputs())]
    shares = [
        step(module(tensors, heads=heads), rows, empty_pages())
        for heads in (slice(0, 2), slice(2, 4))
    ]
    for index, theirs in enumerate(expected):
        total = shares[0][0][index] + shares[1][0][index]
        np.testing.assert_allclose(total, theirs, atol=2e-5)
    for mine, theirs in zip(shares[0][1], shares[1][1], strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_bfloat16(tensors, expected):
    rows = [(s, 0, x) for s, x in enumerate(inputs())]
    got, (k, _) = step(module(tensors, jnp.bfloat16), rows, empty_pages(jnp.bfloat16))
    assert k.dtype == jnp.bfloat16
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == jnp.bfloat16
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(mine.astype(np.float32), theirs, atol=0.03 * scale)

"""Choice of rows and attention to them, against NumPy; equal scores, in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import coverage
from pallas_kernels.quantize import as_bits, quantize_rows
from pallas_kernels.sparse_attention import attend_chosen, choose_positions, reference
from pallas_kernels.target import use_target
from tests.pallas_kernels.shapes import H200, V6E, shape

HEADS, WIDTH, PAGE, PAGES = 16, 8, 4, 10
SEQUENCE = np.repeat(np.array([0, 2, 1, 1], np.int32), [1, 19, 1, 2])
POSITION = np.array([3, *range(20, 39), 39, 7, -1], np.int32)
"""A decoding token, a chunk of more tokens than are scored at a time, and a padding token."""


@pytest.mark.parametrize("cache", ["float32", "int8", "fp8", "int8 beside rotated keys"])
def test_against_numpy(cache, monkeypatch):
    """In blocks of positions and of tokens. The same rows are keys of the indexer and latents."""
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 12)
    monkeypatch.setattr(reference, "GATHERED_BYTES", 7 * 24 * 4 * WIDTH)
    rng, split, scales = np.random.default_rng(1), "beside" in cache, []
    draws = [(3 * PAGES, 1, PAGE, WIDTH), (3 * PAGES, 1, PAGE, 2)]
    rows, rotated = (rng.normal(size=size).astype(np.float32) for size in draws)
    pages = jnp.asarray(rows)
    if cache != "float32":
        values, scale = quantize_rows(pages.reshape(-1, WIDTH), cache.split()[0])
        rows = (np.asarray(values, np.float32) * np.asarray(scale)[:, None]).reshape(rows.shape)
        pages, scales = as_bits(values).reshape(rows.shape), [scale.reshape(rows.shape[:3])]
    latents = np.concatenate([rows, rotated], axis=-1) if split else rows
    table = rng.permutation(3 * PAGES).reshape(3, PAGES).astype(np.int32)
    draws = [(HEADS, WIDTH), (HEADS,), (4, latents.shape[-1])]
    looks, weights, queries = (rng.normal(size=(len(SEQUENCE), *d)).astype("f") for d in draws)
    where = tuple(map(jnp.asarray, (table, SEQUENCE, POSITION)))
    chosen = choose_positions(looks, weights, (pages, *scales), *where, top_k=24)
    held = pages, *([jnp.asarray(rotated)] if split else []), *scales
    found, sums = attend_chosen(queries, held, chosen, *where[:2], scale=0.5, v_width=5)
    for token, (sequence, position) in enumerate(zip(SEQUENCE, POSITION, strict=True)):
        keys = rows[table[sequence], 0].reshape(-1, WIDTH)[: position + 1]
        scores = weights[token] @ np.maximum(looks[token] @ keys.T, 0)
        best = np.argsort(-scores, kind="stable")[:24]
        assert chosen[token].tolist() == [*sorted(best), *[-1] * (24 - len(best))]
        seen = latents[table[sequence], 0].reshape(-1, latents.shape[-1])[best]
        shares = np.exp(0.5 * queries[token] @ seen.T)
        mixed = shares @ seen[:, :5] / np.maximum(shares.sum(-1, keepdims=True), 1e-30)
        np.testing.assert_allclose(found[token], mixed, rtol=0, atol=2e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(sums[token], np.log(shares.sum(-1)), rtol=1e-5, atol=2e-6)


def test_the_lowest_of_equal_positions_wins():
    """Keys that no head looks at score 0, and -0 where all weights are negative. JAX's `top_k`
    takes the lowest index of equal numbers, but puts -0 behind 0."""
    assert jax.lax.top_k(jnp.asarray([0.0, -0.0, 0.0, 1.0, 0.0]), 4)[1].tolist() == [3, 0, 2, 4]
    keys = jnp.asarray([-1.0, 2.0, -3.0, -1.0, 2.0, -5.0, 1.0, -1.0]).reshape(2, 1, 4, 1)
    places = jnp.asarray([[0, 1]], jnp.int32), jnp.zeros(2, jnp.int32), jnp.full(2, 7, jnp.int32)
    weights = jnp.asarray([[1.0], [-1.0]])
    found = choose_positions(jnp.ones((2, 1, 1)), weights, (keys,), *places, top_k=6)
    assert found.tolist() == [[0, 1, 2, 3, 4, 6], [0, 2, 3, 5, 6, 7]]


@pytest.mark.parametrize(
    ("target", "width", "missing"), [(H200, 576, []), (V6E, 576, ["attend_chosen"]), (V6E, 640, [])]
)
def test_operations_without_a_kernel(target, width, missing):
    """XLA keeps rows of 576 on a TPU with the tokens last, and would copy the pool."""

    def call(queries, weights, keys, latent_queries, latents, *where):
        chosen = choose_positions(queries, weights, (keys,), *where, top_k=64)
        return attend_chosen(latent_queries, (latents,), chosen, *where[:2], scale=1.0, v_width=512)

    where = shape(4, 8, dtype=jnp.int32), *(shape(4, dtype=jnp.int32),) * 2
    index = shape(4, 16, 128), shape(4, 16, dtype=jnp.float32), shape(16, 1, 64, 128)
    with use_target(target), coverage.collect_fallbacks() as found:
        jax.eval_shape(call, *index, shape(4, 128, width), shape(16, 1, 64, width), *where)
    assert [one.op for one in found] == missing

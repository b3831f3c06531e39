"""The choice of positions by the TPU kernels, interpreted, with their races looked for, and by the
Hopper kernel, replayed; attention to copies of the chosen rows; and both compiled."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import as_bits, quantize_rows
from pallas_kernels.sparse_attention import (
    attend_chosen,
    choose_positions,
    gathered,
    mosaic_gpu,
    mosaic_tpu,
    mosaic_tpu_select,
)
from pallas_kernels.sparse_attention.cases import cases
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.gpu_aot import compiled_cases
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.tpu_races import no_race  # noqa: F401

TINY = Target("mosaic_tpu", "TPU7x tiny", interpret=True)
PAGE, PAGES, HEADS, WIDTH, TOP_K = 16, 20, 16, 128, 40
SEQUENCE = np.repeat(np.array([0, 2, 1, 1], np.int32), [1, 11, 1, 2])
POSITION = np.array([3, *range(290, 301), 319, 70, -1], np.int32)
"""A decoding token, a chunk of two items, the end of a table, and a padding token."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "PART_TOKENS", 64)
    monkeypatch.setattr(mosaic_tpu, "COLUMNS", 32)
    monkeypatch.setattr(mosaic_gpu, "processors", lambda target: 6)
    for module in (mosaic_tpu, mosaic_tpu_select):
        monkeypatch.setattr(module, "STEP", 256)


def keys_of(cache, rng, page=PAGE):
    """Pages of random keys and their scales, and the keys as numbers."""
    rows = rng.normal(size=(3 * PAGES * PAGE // page, 1, page, WIDTH)).astype(np.float32)
    if cache in ("float32", "bfloat16"):
        kept = jnp.asarray(rows, cache)
        return (kept,), np.asarray(kept, np.float32)
    values, scale = quantize_rows(jnp.asarray(rows.reshape(-1, WIDTH)), cache)
    pages = as_bits(values).reshape(rows.shape), scale.reshape(rows.shape[:3])
    numbers = np.asarray(values, np.float32).reshape(rows.shape)
    return pages, numbers * np.asarray(pages[1])[..., None]


def best_of(scores, top_k):
    return sorted(np.argsort(-scores, kind="stable")[:top_k].tolist())


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("tokens", [slice(None), slice(0, 14, 6)], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("cache", "page"),
    [("float32", PAGE), ("int8", PAGE), ("fp8", PAGE), *(("bfloat16", n) for n in (PAGE, 64, 320))],
    ids=["float32", "int8", "fp8", *(f"hopper {n}" for n in (PAGE, 64, 320))],
)
def test_choice_against_numpy(cache, page, tokens):
    """Positive and negative weights; more and fewer positions than are chosen. BF16 on Hopper."""
    rng = np.random.default_rng(1)
    pages, rows = keys_of(cache, rng, page)
    sequence, position = SEQUENCE[tokens], POSITION[tokens]
    table = rng.permutation(len(rows)).reshape(3, -1).astype(np.int32)
    hopper = cache == "bfloat16"
    dtype = "bfloat16" if hopper else "float32"
    looks = jnp.asarray(rng.normal(size=(len(sequence), HEADS, WIDTH)), dtype)
    weights = rng.normal(size=looks.shape[:2]).astype(np.float32)
    choose = functools.partial(choose_positions, top_k=TOP_K)
    arguments = looks, weights, pages, *map(jnp.asarray, (table, sequence, position))
    if hopper:
        chosen = replay(choose, *arguments)
    else:
        with use_target(TINY):
            chosen = choose(*arguments)
    looks = np.asarray(looks, np.float32)
    for token, (own, last) in enumerate(zip(sequence, position, strict=True)):
        keys = rows[table[own], 0].reshape(-1, WIDTH)[: last + 1]
        best = best_of(weights[token] @ np.maximum(looks[token] @ keys.T, 0), TOP_K)
        assert chosen[token].tolist() == [*best, *[-1] * (TOP_K - len(best))]


@pytest.mark.parametrize("barrier", ["loaded.at[slot]", "query_loaded"])
def test_a_wait_that_is_left_out_on_hopper(barrier, monkeypatch):
    changed = mutated(mosaic_gpu._body, (f"plgpu.barrier_wait({barrier})", "pass"))
    monkeypatch.setattr(mosaic_gpu, "_body", changed)
    with pytest.raises(Unordered):
        test_choice_against_numpy("bfloat16", PAGE, slice(1, 2))


def test_selection_among_equal_scores():
    """Zeros of both signs, all scores negative, one -inf, exactly as many as are chosen, and equal
    scores at the boundary across steps."""
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(10, 1024)).astype(np.float32)
    scores[1] = np.where(scores[1] < 1.5, 0, scores[1])
    scores[2] = np.where(rng.random(1024) < 0.5, -0.0, 0.0)
    scores[3], scores[4, 5] = -np.abs(scores[3]), -np.inf
    scores[5] = np.round(scores[5] * 2)
    position = np.array([1023, 1023, 1000, 900, 30, 1023, -1, TOP_K - 1, 0, 256], np.int32)
    arguments = *map(jnp.asarray, (scores, position)), TOP_K
    found = mosaic_tpu_select.select(*arguments, interpret=mosaic_tpu.INTERPRETER)
    for token, last in enumerate(position):
        seen = scores[token, : last + 1]
        best = [place for place in best_of(seen, TOP_K) if seen[place] > -math.inf]
        assert found[token].tolist() == [*best, *[-1] * (TOP_K - len(best))]


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_attention_to_copied_rows(cache, monkeypatch):
    """Two tokens at a time; none, one, some and all places are taken."""
    two = 2 * 256 * WIDTH * (4 if cache == "float32" else 1)
    monkeypatch.setattr(gathered, "GATHERED_BYTES", two)
    rng = np.random.default_rng(4)
    pages, rows = keys_of(cache, rng)
    table = rng.permutation(3 * PAGES).reshape(3, PAGES).astype(np.int32)
    sequence, chosen = np.array([0, 1, 2, 2, 1], np.int32), np.full((5, 200), -1, np.int32)
    for token, count in enumerate((0, 1, 200, 150, 128)):
        chosen[token, :count] = np.sort(rng.permutation(PAGES * PAGE)[:count])
    queries = rng.normal(size=(5, 8, WIDTH)).astype(np.float32)
    with use_target(TINY):
        where = map(jnp.asarray, (chosen, table, sequence))
        found, _ = attend_chosen(queries, pages, *where, scale=0.1, v_width=64)
    for token, own in enumerate(sequence):
        seen = rows[table[own], 0].reshape(-1, WIDTH)[chosen[token][chosen[token] >= 0]]
        shares = np.exp(0.1 * queries[token] @ seen.T)
        mixed = shares @ seen[:, :64] / np.maximum(shares.sum(-1, keepdims=True), 1e-30)
        np.testing.assert_allclose(found[token], mixed, rtol=0, atol=2e-6)


@pytest.mark.tpu_aot
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("case", ["v7x choose fp8", "v7x attend fp8", "v6e", "v7x"])
def test_steps_of_deepseek_compile(case):
    """No pool is copied: an index has 268 MB in 8 bits, and latents 1.3 GB."""
    generation, _, name = case.partition(" ")
    results = compiled_cases("sparse_attention", generation, *filter(None, [name]))
    found = {name: one["temporary_bytes"] for name, one in results.items()}
    assert set(found) == ({name} if name else {case.name for case in cases(generation)})
    for step, size in found.items():
        assert size < (160 if "choose" in step else 1000) * 2**20

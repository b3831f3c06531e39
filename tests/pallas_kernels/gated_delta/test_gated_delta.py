"""One step of the recurrence on every backend against NumPy, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import delta_step, mosaic_gpu
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.gpu_aot import compiled_cases
from tests.pallas_kernels.hopper_memory import Unordered
from tests.pallas_kernels.hopper_replay import mutated, replay
from tests.pallas_kernels.tpu_races import no_race  # noqa: F401

POOL, ROWS, HEADS, WIDTH = 6, 3, 4, 128


def batch(tokens):
    """Three rows of which the first ones are tokens; the second one's sequence begins."""
    rng = np.random.default_rng(tokens)
    states = rng.normal(size=(POOL, HEADS, WIDTH, WIDTH))
    value = rng.normal(size=(ROWS, HEADS, WIDTH))
    query, key = rng.normal(size=(2, ROWS, HEADS // 2, WIDTH)) * WIDTH**-0.5
    decay, rate = -rng.exponential(size=(ROWS, HEADS)), rng.random((ROWS, HEADS))
    states[1], decay[1] = np.nan, -np.inf
    page = np.asarray([*(4, 1)[:tokens], *[POOL] * (ROWS - tokens)], np.int32)
    floats = (np.asarray(each, np.float32) for each in (query, key, value, decay, rate))
    return np.asarray(states, np.float32), page, *floats


def delta_numpy(states, page, query, key, value, decay, rate):
    """The formulas in FP64, token by token."""
    states, read = states.astype(np.float64), np.zeros(value.shape)
    for row, head in np.ndindex(np.count_nonzero(page < POOL), HEADS):
        k, state = key[row, head // 2], states[page[row], head]
        begins = decay[row, head] == -np.inf
        state = np.zeros((WIDTH, WIDTH)) if begins else state * np.exp(decay[row, head])
        state = state + np.outer(k, rate[row, head] * (value[row, head] - state.T @ k))
        states[page[row], head], read[row, head] = state, state.T @ query[row, head // 2]
    return states, read


def run(backend, arguments):
    """Interprets the kernel for TPUs, and replays the one for Hopper."""
    call = functools.partial(delta_step)
    if backend == "mosaic_gpu":
        return replay(call, *arguments)
    with use_target(Target(backend, "tiny", interpret=True)):
        return jax.jit(call)(*map(jnp.asarray, arguments))


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("backend", ["reference", "mosaic_tpu", "mosaic_gpu"])
def test_against_numpy(backend, tokens):
    """Two value heads share a key head. Pages without a token stay as they are, NaN too."""
    arguments = batch(tokens)
    (states, read), (expected, wanted) = run(backend, arguments), delta_numpy(*arguments)
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(read[:tokens], wanted[:tokens], rtol=0, atol=1e-5)


def test_a_wait_that_is_left_out(monkeypatch):
    changed = mutated(mosaic_gpu._body, ("plgpu.barrier_wait(loaded)", "pass"))
    monkeypatch.setattr(mosaic_gpu, "_body", changed)
    with pytest.raises(Unordered, match="before a copy"):
        run("mosaic_gpu", batch(2))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", ["v6e", "v7x"])
def test_it_compiles_in_place(generation):
    """The pools have 268 and 537 MB."""
    found = compiled_cases("gated_delta", generation)
    assert len(found) == 3
    assert max(one["temporary_bytes"] for one in found.values()) < 16e6

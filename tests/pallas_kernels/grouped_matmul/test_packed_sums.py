"""Sums to and from packed INT8: the Hopper kernels as they ship, replayed, and XLA, against NumPy.

In a replay an index beyond an array is an error: JAX's interpreter, and NumPy, read another row.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu_sums, packed_sums
from pallas_kernels.grouped_matmul.routed import Choices, sort_choices
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.hopper_replay import mutated, replay

pytestmark = pytest.mark.unoptimised

H200 = Target("mosaic_gpu", "NVIDIA H200")
RUNS = {
    "gpu": lambda function: jax.tree.map(np.asarray, replay(function)),
    "xla": lambda function: function(),
}
"""How a function is run."""
TOKENS, TOP_K, GROUPS, D, WORDS = 8, 2, 3, 256, 384


def packed_numpy(sums):
    """Values, the bytes of the scales, zeros."""
    scales = np.abs(sums).max(axis=1) * np.float32(1 / 127)
    values = np.rint(sums * (1 / scales)[:, None]).astype(np.int8)
    of_scales = scales.astype(np.float32)[:, None].view(np.int8)
    return np.concatenate([values, of_scales, np.zeros((len(sums), 124), np.int8)], axis=1)


def sums_of(packed):
    return packed[:, :D] * packed[:, D : D + 4].copy().view(np.float32)


def agree(found, expected):
    """Sums that are rounded in another order may round to the next value."""
    assert found.shape == expected.shape
    assert np.abs(found[:, :D].astype(int) - expected[:, :D]).max() <= 1
    assert np.mean(found[:, :D] != expected[:, :D]) < 0.01
    scales, of_expected = (
        array[:, D : D + 4].copy().view(np.float32) for array in (found, expected)
    )
    np.testing.assert_allclose(scales, of_expected, 1e-5)
    assert not found[:, D + 4 :].any()


def summed(base, order, rows, gates=None):
    """A base and the rows of the choices that are here, in NumPy."""
    total = base.astype(np.float32)
    for token, choice in np.argwhere(np.asarray(order.here)):
        gate = 1 if gates is None else gates[token, choice]
        total[token] += rows[order.place[token, choice]].astype(np.float32) * gate
    return total


def choices_of(rng, tokens=TOKENS):
    """Choices of which some are elsewhere, in order."""
    choices = rng.integers(-1, GROUPS + 1, (tokens, TOP_K)).astype(np.int32)
    return choices, sort_choices(jnp.asarray(choices), GROUPS)


@pytest.mark.parametrize("target", RUNS)
@pytest.mark.parametrize(
    ("has_base", "has_choices", "major"),
    [(True, True, (2, 4)), (False, True, (1, 8)), (True, False, (1, 1))],
)
def test_sums_are_packed(target, has_base, has_choices, major):
    """Values of a choice of no group may be anything; blocks of rows change places."""
    rng = np.random.default_rng(0)
    choices, order = choices_of(rng)
    rows = rng.normal(size=(TOKENS * TOP_K, D)).astype(jnp.bfloat16)
    rows[int(np.sum(order.sizes)) :] = np.nan
    here = np.asarray(order.here)
    gates = np.where(here, rng.random(choices.shape), np.nan).astype(np.float32)
    base = rng.normal(size=(TOKENS, D)).astype(jnp.bfloat16)
    taken = order if has_choices else order._replace(here=np.zeros_like(here))
    expected = summed(base.astype(np.float32) * has_base, taken, rows, gates)
    sums = packed_sums.Unsummed(
        jnp.asarray(base) if has_base else None,
        Choices(jnp.asarray(rows), jnp.asarray(gates), order) if has_choices else None,
    )
    found = np.asarray(RUNS[target](lambda: sums.packed(WORDS, major)))
    np.testing.assert_allclose(sums.total(), expected, 1e-5, 1e-6)
    blocks = expected.reshape(*major, -1, D).swapaxes(0, 1).reshape(-1, D)
    filled = np.abs(blocks).max(axis=1) > 0
    agree(found[filled], packed_numpy(blocks[filled]))
    # A row of zeros has the scale 1.
    np.testing.assert_array_equal(sums_of(found)[~filled], 0)


@pytest.mark.parametrize("target", RUNS)
def test_what_was_packed_is_added_up(target):
    rng = np.random.default_rng(0)
    parts = [packed_numpy(rng.normal(size=(3, D)).astype(np.float32)) for _ in range(4)]
    expected = np.sum([sums_of(part) for part in parts], axis=0)
    found = RUNS[target](lambda: packed_sums.sum_packed(jnp.asarray(parts), D))
    again = np.asarray(RUNS[target](lambda: packed_sums.sum_and_pack(jnp.asarray(parts), D)))
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    agree(again, packed_numpy(expected))
    np.testing.assert_array_equal(packed_sums.unpack(jnp.asarray(parts[0]), D), sums_of(parts[0]))


@pytest.mark.parametrize("target", RUNS)
@pytest.mark.parametrize("has_base", [True, False])
def test_choices_that_came_packed(target, has_base):
    """Rows of choices with their own scales, and no gates; a row of none has garbage."""
    rng = np.random.default_rng(1)
    choices, _ = choices_of(rng)
    choices[3] = -1
    order = sort_choices(jnp.asarray(choices), GROUPS)
    rows = packed_numpy(rng.normal(size=(TOKENS * TOP_K, D)).astype(np.float32))
    rows[int(np.sum(order.sizes)) :] = -1  # as a scale: no number
    base = rng.normal(size=(TOKENS, D)).astype(jnp.bfloat16)
    expected = summed(base.astype(np.float32) * has_base, order, sums_of(rows))
    sums = packed_sums.Unsummed(
        jnp.asarray(base) if has_base else None, Choices(jnp.asarray(rows), None, order), D
    )
    assert sums.shape == (TOKENS, D)
    found = np.asarray(RUNS[target](lambda: sums.packed(WORDS, everywhere=False)))
    np.testing.assert_allclose(sums.total(), expected, 1e-5, 1e-6)
    known = np.abs(expected).max(axis=1) > 0
    assert known.sum() == TOKENS - (not has_base) * (~np.asarray(order.here).any(axis=1)).sum()
    agree(found[known], packed_numpy(expected[known]))


def test_parts_are_sums():
    rng = np.random.default_rng(0)
    parts = jnp.asarray([packed_numpy(rng.normal(size=(3, D)).astype(np.float32)) for _ in "ab"])
    sums = packed_sums.Parts(parts, D)
    np.testing.assert_array_equal(sums.total(), packed_sums.sum_packed(parts, D))
    np.testing.assert_array_equal(sums.packed(WORDS), packed_sums.sum_and_pack(parts, D))
    with pytest.raises(ValueError, match="rows of 256 words, and parts have 384"):
        sums.packed(256)


@pytest.mark.parametrize("target", RUNS)
def test_pieces_of_rows(target):
    """Sums of choices and a base, and of parts."""
    rng = np.random.default_rng(2)
    _, order = choices_of(rng, 6)
    rows = packed_numpy(rng.normal(size=(6 * TOP_K, D)).astype(np.float32))
    base = rng.normal(size=(6, D)).astype(np.float32)
    expected = summed(base, order, sums_of(rows))
    sums = packed_sums.Unsummed(jnp.asarray(base), Choices(jnp.asarray(rows), None, order), D)
    parts = packed_sums.Parts(jnp.asarray([rows[:6], rows[6:12]]), D)
    found = RUNS[target](lambda: tuple(sums.pieces(WORDS, 2)))
    added = RUNS[target](lambda: tuple(parts.pieces(WORDS, 3)))
    np.testing.assert_allclose(sums.total(), expected, 1e-5, 1e-6)
    assert [piece.shape for piece in (*found, *added)] == [(3, WORDS)] * 2 + [(2, WORDS)] * 3
    agree(np.concatenate(found), packed_numpy(expected))
    agree(np.concatenate(added), packed_numpy(sums_of(rows[:6]) + sums_of(rows[6:12])))


@pytest.mark.parametrize(
    ("name", "change", "test"),
    [
        # A row before the first, of a choice that is elsewhere: what is there would not show.
        (
            "_pack",
            ("jnp.maximum(place, 0)", "place"),
            lambda: test_choices_that_came_packed("gpu", True),
        ),
        ("_in_its_part", ("row - first", "row"), lambda: test_pieces_of_rows("gpu")),
        ("_in_its_part", ("number * rows", "0"), lambda: test_pieces_of_rows("gpu")),
    ],
)
def test_other_rows_are_noticed(monkeypatch, name, change, test):
    monkeypatch.setattr(mosaic_gpu_sums, name, mutated(getattr(mosaic_gpu_sums, name), change))
    with pytest.raises(AssertionError):
        test()


def test_rows_without_a_kernel():
    """Other widths are XLA's, and so are no rows."""
    with use_target(H200):
        assert packed_sums.Unsummed(jnp.ones((2, 5))).packed(9).shape == (2, 9)
        assert packed_sums.Unsummed(jnp.ones((0, D))).packed(WORDS).shape == (0, WORDS)


def test_blocks_of_rows(monkeypatch):
    """One row or column of blocks keeps its order, whatever their number."""
    asked = []
    monkeypatch.setattr(
        mosaic_gpu_sums, "pack", lambda *given, everywhere: (asked.append(given[3]),)
    )
    six = packed_sums.Unsummed(jnp.ones((6, D)))
    with use_target(H200):
        for major in ((2, 3), (4, 1), (1, 4)):
            inspect.unwrap(packed_sums.Unsummed.packed)(six, WORDS, major)
        with pytest.raises(ValueError, match="6 rows are not 2 x 4 equal blocks"):
            six.packed(WORDS, (2, 4))
    assert asked == [(2, 3), (1, 1), (1, 1)]

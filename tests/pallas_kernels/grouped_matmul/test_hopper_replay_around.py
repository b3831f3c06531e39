"""The Hopper kernels around experts as they ship, replayed in NumPy, where an index beyond an array
is an error: JAX's interpreter, and NumPy, read another row."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu_pick, mosaic_gpu_sort, mosaic_gpu_sums
from pallas_kernels.grouped_matmul.packed_sums import Unsummed, sum_and_pack, sum_packed
from pallas_kernels.grouped_matmul.routed import Choices, sort_choices
from tests.pallas_kernels.grouped_matmul.test_packed_sums import (
    WORDS,
    D,
    agree,
    packed_numpy,
    sums_of,
)
from tests.pallas_kernels.hopper_replay import TARGET, mutated, replay

CHOICES = np.asarray([[2, 0], [1, 9], [0, -1], [2, 1], [-1, -1], [1, 0]], np.int32)
GROUPS = 3


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch):
    for module in (mosaic_gpu_pick, mosaic_gpu_sort):
        monkeypatch.setattr(module, "processors", lambda target: 1)


def test_choices_are_sorted():
    order = replay(lambda choices: tuple(sort_choices(choices, GROUPS)), CHOICES)
    source, place, here, sizes = order
    np.testing.assert_array_equal(source, [0, 2, 5, 1, 3, 5, 0, 3, 1, 2, 4, 4])
    np.testing.assert_array_equal(place, [[6, 0], [3, -1], [1, -1], [7, 4], [-1, -1], [5, 2]])
    np.testing.assert_array_equal(here, (CHOICES >= 0) & (CHOICES < GROUPS))
    np.testing.assert_array_equal(sizes, [3, 3, 2])


def sorted_once():
    """Where every token but one has a group twice."""
    choices = np.asarray([[2, 2, 0], [1, 9, 1], [0, 1, 2], [0, 0, 0]], np.int32)
    return replay(lambda choices: tuple(sort_choices(choices, GROUPS, once=True)), choices)


def test_choices_are_sorted_once():
    source, place, here, sizes = sorted_once()
    np.testing.assert_array_equal(source[:7], [0, 2, 3, 1, 2, 0, 2])
    expected = [[5, -1, 0], [3, -1, -1], [1, 4, 6], [2, -1, -1]]
    np.testing.assert_array_equal(place, expected)
    np.testing.assert_array_equal(here, np.asarray(expected) >= 0)
    np.testing.assert_array_equal(sizes, [3, 2, 2])


@pytest.mark.parametrize(
    "change", [("lax.rem(place, top_k) >= back", "place >= back"), ("at - back", "at")]
)
def test_choices_of_other_tokens_and_all_are_noticed(monkeypatch, change):
    monkeypatch.setattr(mosaic_gpu_sort, "_body", mutated(mosaic_gpu_sort._body, change))
    with pytest.raises(AssertionError):
        test_choices_are_sorted_once()


def packed():
    """Sums of a base and of choices, of which one token has none, found and expected; 2 x 3 blocks
    of one row change places."""
    rng = np.random.default_rng(0)
    order = sort_choices(jnp.asarray(CHOICES), GROUPS)
    rows = rng.normal(size=(CHOICES.size, D)).astype(np.float32)
    rows[8:] = np.nan
    gates = np.where(order.here, rng.random(CHOICES.shape), np.nan).astype(np.float32)
    base = rng.normal(size=(len(CHOICES), D)).astype(np.float32)
    expected, major = base.copy(), (2, 3)
    for token, choice in np.argwhere(np.asarray(order.here)):
        expected[token] += rows[order.place[token, choice]] * gates[token, choice]

    def pack(base, rows, gates):
        sums = Unsummed(base, Choices(rows, gates, order))
        return mosaic_gpu_sums.pack(sums, WORDS, major, TARGET)

    found = replay(pack, base, rows, gates)
    return found, packed_numpy(expected.reshape(*major, D).swapaxes(0, 1).reshape(-1, D))


def test_sums_are_packed():
    agree(*packed())


def test_a_row_before_the_first_is_noticed(monkeypatch):
    """Of a choice that is elsewhere: what is there would not show."""
    changed = mutated(mosaic_gpu_sums._pack, ("jnp.maximum(place, 0)", "place"))
    monkeypatch.setattr(mosaic_gpu_sums, "_pack", changed)
    with pytest.raises(AssertionError, match="index -1 of 12"):
        packed()


def in_pieces():
    """Sums of choices and a base in two pieces, found and expected."""
    rng = np.random.default_rng(0)
    order = sort_choices(jnp.asarray(CHOICES), GROUPS)
    rows = rng.normal(size=(CHOICES.size, D)).astype(np.float32)
    base = rng.normal(size=(len(CHOICES), D)).astype(np.float32)
    expected = base.copy()
    for token, choice in np.argwhere(np.asarray(order.here)):
        expected[token] += rows[order.place[token, choice]]

    def pack(base, rows):
        sums = Unsummed(base, Choices(rows, None, order))
        return mosaic_gpu_sums.pack_pieces(sums, WORDS, (1, 1), TARGET, 2)

    return np.concatenate(replay(pack, base, rows)), packed_numpy(expected)


def test_sums_are_packed_in_pieces():
    agree(*in_pieces())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_in_its_part", ("row - first", "row")),
        ("_in_its_part", ("number * rows", "0")),
    ],
)
def test_rows_of_another_piece_are_noticed(monkeypatch, name, change):
    monkeypatch.setattr(mosaic_gpu_sums, name, mutated(getattr(mosaic_gpu_sums, name), change))
    with pytest.raises(AssertionError):
        agree(*in_pieces())


def test_what_was_packed_is_added_up():
    rng = np.random.default_rng(0)
    parts = np.asarray([packed_numpy(rng.normal(size=(3, D)).astype(np.float32)) for _ in range(4)])
    expected = np.sum([sums_of(part) for part in parts], axis=0)
    np.testing.assert_allclose(replay(functools.partial(sum_packed, d=D), parts), expected, 1e-5)
    agree(replay(functools.partial(sum_and_pack, d=D), parts), packed_numpy(expected))


def test_rows_are_picked():
    """Negative indices count from the end, as of JAX's arrays; the last group ends after four."""
    rows = np.arange(5 * D, dtype=np.int8).reshape(5, D)
    source = np.asarray([4, -5, 0, -1, 2, 3], np.int32)

    def pick(rows, source, ends):
        return mosaic_gpu_pick.pick_rows(rows, mosaic_gpu_pick.Picked(source, ends, TARGET))

    found = replay(pick, rows, source, np.asarray([1, 4], np.int32))
    np.testing.assert_array_equal(found[:4], rows[[4, 0, 0, 4]])
    assert (found[4:] == 77).all()  # nobody's: not written

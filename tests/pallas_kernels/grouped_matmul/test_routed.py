"""From tokens to tokens: order, gates and windows, against plain loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import mosaic_gpu_sort
from pallas_kernels.grouped_matmul.routed import (
    _by_counting,
    _by_sorting,
    combine,
    routed_choices,
    sort_choices,
)
from tests.pallas_kernels.hopper_replay import mutated, replay

pytestmark = pytest.mark.unoptimised

D_MODEL, D_FF, GROUPS = 6, 5, 7


def weights(seed=0, groups=GROUPS):
    rng = np.random.default_rng(seed)
    shapes = ((groups, D_FF, D_MODEL), (groups, D_FF, D_MODEL), (groups, D_MODEL, D_FF))
    return [rng.normal(scale=0.4, size=shape).astype(np.float32) for shape in shapes]


def swiglu_numpy(row, gate, up, down):
    gated = gate @ row
    return down @ (gated / (1 + np.exp(-gated)) * (up @ row))


def routed_numpy(x, choices, gates, arrays, first, count):
    out = np.zeros(x.shape, np.float64)
    for token, choice in np.ndindex(*choices.shape):
        if 0 <= (group := choices[token, choice]) < count:
            network = (array[first + group].astype(np.float64) for array in arrays)
            out[token] += gates[token, choice] * swiglu_numpy(x[token], *network)
    return out


def test_order():
    order = sort_choices(jnp.asarray([[2, 0], [1, 9], [0, -1], [2, 1]], jnp.int32), 3)
    #          rows: group 0: tokens 0, 2; group 1: tokens 1, 3; group 2: tokens 0, 3; none: 1, 2
    np.testing.assert_array_equal(order.source, [0, 2, 1, 3, 0, 3, 1, 2])
    np.testing.assert_array_equal(order.place, [[4, 0], [2, -1], [1, -1], [5, 3]])
    np.testing.assert_array_equal(order.here, [[1, 1], [1, 0], [1, 0], [1, 1]])
    np.testing.assert_array_equal(order.sizes, [2, 2, 2])


def test_order_of_each_group_once():
    order = sort_choices(jnp.asarray([[2, 2, 0], [1, 9, 1], [0, 0, 0]], jnp.int32), 3, once=True)
    np.testing.assert_array_equal(order.source[:4], [0, 2, 1, 0])
    np.testing.assert_array_equal(order.place, [[3, -1, 0], [2, -1, -1], [1, -1, -1]])
    np.testing.assert_array_equal(order.here, [[1, 0, 1], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(order.sizes, [2, 1, 1])


@pytest.mark.parametrize("once", [False, True])
def test_order_of_no_tokens(once):
    """Under `jit`, which traces the branches of every platform."""
    sort = jax.jit(functools.partial(sort_choices, groups=3, once=once))
    source, place, here, sizes = sort(jnp.zeros((0, 2), jnp.int32))
    assert (source.shape, place.shape, here.shape) == ((0,), (0, 2), (0, 2))
    np.testing.assert_array_equal(sizes, [0, 0, 0])


@pytest.mark.parametrize("tokens", [1, 7, 211])
def test_counting_gives_the_order_that_sorting_gives(tokens):
    """More choices, or fewer, than are compared with each other at once."""
    group = np.random.default_rng(0).integers(0, 6, 3 * tokens).astype(np.int32)
    order = np.argsort(group, stable=True)
    for found in (_by_counting(jnp.asarray(group), 6, 3), _by_sorting(jnp.asarray(group), 6, 3)):
        source, place, sizes = map(np.asarray, found)
        assert source.dtype == place.dtype == sizes.dtype == np.int32
        np.testing.assert_array_equal(source, order // 3)
        np.testing.assert_array_equal(place[order], np.arange(3 * tokens))
        np.testing.assert_array_equal(sizes, np.bincount(group, minlength=6))


def order_on_hopper(tokens, once, monkeypatch):
    """Compares the order that the kernel makes, as it ships, with XLA's."""
    monkeypatch.setattr(mosaic_gpu_sort, "processors", lambda target: 1)
    choices = np.random.default_rng(0).integers(-1, 7, (tokens, 2)).astype(np.int32)
    found = replay(lambda choices: tuple(sort_choices(choices, 5, once=once)), choices)
    expected = sort_choices(jnp.asarray(choices), 5, once=once)
    for name, one, other in zip(expected._fields, found, expected, strict=True):
        assert one.dtype == other.dtype, name
        there = slice(int(expected.sizes.sum()) if once and name == "source" else None)
        np.testing.assert_array_equal(one[there], other[there], err_msg=name)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("tokens", [1, 64])
def test_the_hopper_kernel_gives_the_same_order(tokens, once, monkeypatch):
    """Choices that fill the last block of 128, or do not."""
    order_on_hopper(tokens, once, monkeypatch)


@pytest.mark.parametrize(
    "change", [("lax.rem(place, top_k) >= back", "place >= back"), ("at - back", "at")]
)
def test_choices_of_other_tokens_and_all_are_noticed(change, monkeypatch):
    monkeypatch.setattr(mosaic_gpu_sort, "_body", mutated(mosaic_gpu_sort._body, change))
    with pytest.raises(AssertionError):
        order_on_hopper(64, True, monkeypatch)


def test_sums():
    """A gate, or a row, of a choice that is not here may be anything."""
    order = sort_choices(jnp.asarray([[1, 0], [5, 0], [4, 1]], jnp.int32), 2)
    rows = [[1.0, np.inf], [10.0, 20.0], [100.0, 200.0], [30.0, 40.0], [np.nan] * 2, [np.nan] * 2]
    gates = jnp.asarray([[0.5, 2.0], [np.nan, 3.0], [np.inf, 0.25]])
    total = combine(jnp.asarray(rows, jnp.bfloat16), gates, order)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, [[52, np.inf], [30, 60], [7.5, 10]])


@functools.cache
def windowed(count):
    """The call for a window of `count` groups, compiled once."""

    def call(*arguments):
        found = routed_choices(*arguments[:-1], window=(arguments[-1], count))
        return combine(*found), found.order.sizes

    return jax.jit(call)


@given(
    tokens=st.sampled_from([1, 13]),
    top_k=st.sampled_from([1, 3]),
    first=st.integers(0, 3),
    count=st.sampled_from([1, 4]),
    spread=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_as_numpy(tokens, top_k, first, count, spread, seed):
    """A window of the groups; the weights of the others are poison."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, D_MODEL)).astype(np.float32)
    choices = rng.integers(-1, spread, (tokens, top_k)).astype(np.int32)
    gates = rng.random((tokens, top_k), np.float32)
    arrays = weights(seed)
    poisoned = [array.copy() for array in arrays]
    for array in poisoned:
        array[:first], array[first + count :] = np.nan, np.nan
    share, sizes = windowed(count)(x, choices, gates, *poisoned, jnp.int32(first))
    expected = routed_numpy(x, choices, gates, arrays, first, count)
    np.testing.assert_allclose(share, expected, 1e-4, 1e-5)
    np.testing.assert_array_equal(sizes, [np.sum(choices == group) for group in range(count)])


def test_all_groups():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, D_MODEL)).astype(np.float32)
    choices = np.stack([rng.permutation(GROUPS)[:3] for _ in range(9)]).astype(np.int32)
    gates = rng.random((9, 3), np.float32)
    found = routed_choices(*map(jnp.asarray, (x, choices, gates, *weights())))
    expected = routed_numpy(x, choices, gates, weights(), 0, GROUPS)
    np.testing.assert_allclose(combine(*found), expected, 1e-4, 1e-5)
    assert found.order.sizes.sum() == 27

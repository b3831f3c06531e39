"""The TPU kernel that sums every token's rows, interpreted on the CPU, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_tpu_combine
from pallas_kernels.grouped_matmul.routed import combine, sort_choices
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.nightly import nightly
from tests.pallas_kernels.tpu_races import check_wait, no_race  # noqa: F401

pytestmark = pytest.mark.unoptimised

TARGET = Target("mosaic_tpu", "TPU7x", interpret=True)
TOKENS, TOP_K, GROUPS, D = 24, 2, 4, 128


def arguments(dtype, tokens=TOKENS):
    """Choices of which some are elsewhere, and of which one token, and one block, have none; what
    nobody chose is poison."""
    rng = np.random.default_rng(0)
    choices = np.stack([rng.permutation(GROUPS + 3)[:TOP_K] for _ in range(tokens)])
    choices[3], choices[8:16] = GROUPS, -1
    order = sort_choices(jnp.asarray(choices, jnp.int32), GROUPS)
    rows = rng.normal(size=(tokens * TOP_K, D)).astype(dtype)
    rows[int(order.sizes.sum()) :] = np.nan
    gates = np.where(order.here, rng.random(choices.shape), np.inf).astype(np.float32)
    return jnp.asarray(rows), jnp.asarray(gates), order


def sums_numpy(rows, gates, order):
    """In FP32, in the order of choices."""
    sums = np.zeros((order.place.shape[0], D), np.float32)
    for token, choice in np.argwhere(np.asarray(order.here)):
        row = np.asarray(rows[order.place[token, choice]], np.float32)
        sums[token] += row * np.float32(gates[token, choice])
    return sums


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, *nightly(jnp.float32)])
def test_as_numpy(dtype):
    rows, gates, order = arguments(dtype)
    with use_target(TARGET):
        found = combine(rows, gates, order)
    expected = sums_numpy(rows, gates, order)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.any(expected != 0, axis=1), np.asarray(order.here).any(1))


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    ("device_kind", "tokens", "base_dtype", "dtype", "arrays", "kernel_dtype"),
    [
        ("TPU7x", 48, jnp.bfloat16, jnp.bfloat16, 5, jnp.bfloat16),
        # 16 rows of BF16 are a register tile
        ("TPU7x", 24, jnp.float32, jnp.bfloat16, 4, jnp.float32),
        ("TPU v6 lite", 48, None, jnp.bfloat16, 4, jnp.bfloat16),
        ("TPU v6 lite", 48, jnp.bfloat16, jnp.bfloat16, 4, jnp.float32),
        *nightly(
            ("TPU7x", 48, None, jnp.bfloat16, 4, jnp.bfloat16),
            ("TPU7x", 48, jnp.bfloat16, jnp.float32, 5, jnp.float32),
            ("TPU7x", 24, jnp.float32, jnp.float32, 5, jnp.float32),
            ("TPU7x", 24, jnp.bfloat16, jnp.float32, 4, jnp.float32),
        ),
    ],
)
def test_beside_what_a_token_has_else(
    monkeypatch, device_kind, tokens, base_dtype, dtype, arrays, kernel_dtype
):
    """A base is added to the sum of a token's rows, in FP32, and the sum is rounded once: by the
    kernel, which then has the base as well, or by XLA."""
    outputs, shape_of = [], mosaic_tpu_combine.varying_shape

    def varying_shape(shape, dtype, inputs):
        outputs.append((shape, dtype, len(inputs)))
        return shape_of(shape, dtype, inputs)

    monkeypatch.setattr(mosaic_tpu_combine, "varying_shape", varying_shape)
    rows, gates, order = arguments(jnp.bfloat16, tokens)
    base, expected = None, sums_numpy(rows, gates, order)
    if base_dtype is not None:
        base = np.random.default_rng(1).normal(size=(tokens, D)).astype(base_dtype)
        expected = base.astype(np.float32) + expected
        base = jnp.asarray(base)
    with use_target(TARGET._replace(device_kind=device_kind)):
        found = combine(rows, gates, order, base=base, dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected.astype(dtype))
    assert outputs == [((tokens, D), kernel_dtype, arrays)]


def test_a_dropped_wait_is_noticed(monkeypatch):
    """The sums would read rows that are still on their way."""
    rows, gates, order = arguments(jnp.bfloat16)
    gates = gates[:8]
    order = order._replace(place=order.place[:8], here=order.here[:8])

    def run():
        with use_target(TARGET):
            return combine(rows, gates, order)

    check_wait(monkeypatch, run, mosaic_tpu_combine, mosaic_tpu_combine, "wait_for_rows")


def test_what_is_covered():
    def call(dtype, shape, choices):
        return mosaic_tpu_combine.covers(shape, dtype, choices)

    golden.check_values("pallas_kernels/tpu_combine_covered.txt", call, globals())

"""Baselines compute what the ops do, on the same inputs; what is not there says so."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.shapes import AttentionShape
from pallas_kernels.bench import attention, baselines, correctness, grouped_matmul, timing
from pallas_kernels.grouped_matmul.shapes import ExpertShape

QUICK = timing.Effort(1, 1)
ATTENTION = attention.Step(AttentionShape(4, 2, 64, 64), "bf16", 2, 256, 64)
EXPERTS = grouped_matmul.Step(ExpertShape(128, 64, groups=3, experts=3, top_k=2), "bf16", 8)


@pytest.fixture
def tokamax(monkeypatch):
    """A package of that name, with JAX's own functions under its names."""

    def attend(*arguments, **options):
        with jax.numpy_dtype_promotion("standard"):  # other people's code mixes dtypes
            return jax.nn.dot_product_attention(*arguments, **options)

    module = types.SimpleNamespace(dot_product_attention=attend, ragged_dot=jax.lax.ragged_dot)
    monkeypatch.setitem(sys.modules, "tokamax", module)


@pytest.mark.usefixtures("tokamax")
@pytest.mark.parametrize(
    ("op", "step", "module"),
    [("attention", ATTENTION, attention), ("grouped_matmul", EXPERTS, grouped_matmul)],
)
def test_they_compute_the_same(op, step, module):
    arguments = module.inputs(step)
    right = correctness.expected(module.call(step), arguments)
    found = baselines.measured(op, step, arguments, right, QUICK)
    errors = {name: one["error"] for name, one in found.items() if "seconds" in one}
    assert any(name.startswith("tokamax") for name in errors), found
    assert max(errors.values()) < correctness.TOLERANCE["bf16"]


def test_another_result_is_noticed(monkeypatch):
    def ragged_dot(x, w, sizes, **options):
        return jax.lax.ragged_dot(x, w, jnp.roll(sizes, 1), **options)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(ragged_dot=ragged_dot))
    step = EXPERTS._replace(tokens=7)
    arguments = grouped_matmul.inputs(step)
    right = correctness.expected(grouped_matmul.call(step), arguments)
    found = baselines.measured("grouped_matmul", step, arguments, right, QUICK)
    assert found["tokamax ragged_dot"]["error"] > 0.1 > found["jax ragged_dot"]["error"]


def test_what_they_cannot_do_is_said():
    step = ATTENTION._replace(format="int8")
    found = baselines.measured("attention", step, attention.inputs(step), None, QUICK)
    assert all("skipped" in one for one in found.values())
    assert found["jax paged_attention"]["skipped"].startswith("NotImplementedError: one query")
    weights = EXPERTS._replace(format="int8")
    inputs = grouped_matmul.inputs(weights)
    found = baselines.measured("grouped_matmul", weights, inputs, None, QUICK)
    assert found["jax ragged_dot"] == {"skipped": "NotImplementedError: weights with scales"}


def test_the_pages_of_a_sequence_are_put_in_order():
    arguments = attention.inputs(ATTENTION)
    _, keys, _ = baselines._contiguous(ATTENTION, arguments)
    _, pages, _, (table, *_) = arguments
    # Token 70 of the second sequence, of the second head: row 6 of its second page.
    np.testing.assert_array_equal(keys[1, 70, 1], pages[0][table[1, 1], 1, 6])

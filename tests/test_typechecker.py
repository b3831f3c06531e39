"""Calls of both packages are checked, whether or not arrays are among the arguments."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Array, Float, Int32, PyTree

from jaxserve.engine.pages import PageAllocator
from pallas_kernels.quantize import quantize_weight
from tests.typechecker import _checked, _may_have_shapes, check

pytestmark = pytest.mark.nightly  # annotations are checked there

type Rows = Float[Array, "rows columns"]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Float[Array, " n"], True),
        (tuple[Int32[Array, " n"], ...], True),
        (int | Rows, True),
        (list[Rows], True),
        (PyTree, True),
        ("int", True),
        (int | None, False),
        (Literal["dp", "tp"] | None, False),
        (Sequence[jax.Array], False),
    ],
)
def test_shapes_are_left_to_jaxtyping(annotation, expected):
    assert _may_have_shapes(annotation) == expected


def test_arrays():
    @_checked(typechecker=check)
    def joined(a: Rows, b: Rows) -> Rows:
        return a + b

    rows = jnp.ones((2, 3))
    assert joined(rows, rows).shape == (2, 3)
    with pytest.raises(TypeError, match="whilst checking the parameters"):
        joined(rows, rows[:1])


def multiplier(factor: int) -> Callable[[Rows, Rows], Rows]:
    @_checked(typechecker=check)
    def multiplied(a: Rows, b: Rows) -> Rows:
        return factor * a * b if factor else a[0]

    return multiplied


def test_functions_of_the_same_code_with_arrays_are_apart():
    rows = jnp.ones((2, 3))
    for factor in (1, 2):
        function = multiplier(factor)
        assert function(rows, rows)[0, 0] == factor
        assert function(rows[:1], rows[:1]).shape == (1, 3), "sizes are of one call"
        with pytest.raises(TypeError, match="whilst checking the parameters"):
            function(rows, rows[:1])
    with pytest.raises(TypeError, match="whilst checking the return value"):
        multiplier(0)(rows, rows)


def test_both_packages():
    with pytest.raises(BeartypeCallHintViolation):
        PageAllocator("8")
    with pytest.raises(TypeError, match="whilst checking the parameters"):
        quantize_weight(1, "int8")

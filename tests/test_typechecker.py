"""Calls of both packages are checked, whether or not arrays are among the arguments."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Array, Float, Int32, PyTree

from jaxserve.engine.pages import PageAllocator
from pallas_kernels.quantize import quantize_weight
from tests.typechecker import _checked, _may_have_shapes, check

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


def test_no_arrays():
    @_checked(typechecker=check)
    def numbers(count: int) -> Iterator[int]:
        yield from range(count)

    assert [*numbers(2)] == [0, 1]
    with pytest.raises(BeartypeCallHintViolation):
        next(numbers("2"))


def test_both_packages():
    with pytest.raises(BeartypeCallHintViolation):
        PageAllocator("8")
    with pytest.raises(TypeError, match="whilst checking the parameters"):
        quantize_weight(1, "int8")

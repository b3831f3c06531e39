"""Calls of both packages are checked, whether or not arrays are among the arguments."""

import pytest
from beartype.roar import BeartypeCallHintViolation

from jaxserve.engine.pages import PageAllocator
from pallas_kernels.quantize import quantize_weight

pytestmark = pytest.mark.nightly  # annotations are checked there


def test_both_packages():
    with pytest.raises(BeartypeCallHintViolation):
        PageAllocator("8")
    with pytest.raises(TypeError, match="whilst checking the parameters"):
        quantize_weight(1, "int8")

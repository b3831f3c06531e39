"""Calls of both packages are checked, whether or not arrays are among the arguments."""

import pytest

from jaxserve.engine.pages import PageAllocator
from pallas_kernels.quantize import quantize_weight

pytestmark = pytest.mark.nightly  # annotations are checked there


@pytest.mark.parametrize(("function", "arguments"), [(PageAllocator, "8"), (quantize_weight, "1")])
def test_both_packages(function, arguments):
    with pytest.raises(TypeError, match="whilst checking the parameters"):
        function(*arguments, "int8")

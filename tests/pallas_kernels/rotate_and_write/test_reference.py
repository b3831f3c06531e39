"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import inspect

import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.rotate_and_write.suite import RotateAndWriteSuite, changed, make_case


class TestReference(RotateAndWriteSuite):
    target = Target("reference", "cpu")


NAMES = ("pages", "query", "key", "value", "cosine", "sine", "page_table")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, 0], r"query is bfloat16\(8, 128\), needs floats"),
        ("value", lambda x: x.astype(jnp.float32), r"value is float32\(8, 1, 128\).*one dtype"),
        ("key", lambda x: x[..., :64], r"key \(8, 1, 64\).*must agree in tokens"),
        ("sine", lambda x: x[:, 1:], r"sine is float32\(8, 63\), needs float32\(8, 64\)"),
        ("pages", lambda x: x[:2], r"pages are \['int8', 'int8'\], need keys and values.*scales"),
        ("pages", lambda x: (*x[:3], x[3][1:]), r"pages\[3\] has shape \(5, 1, 8\), needs \(6, 1"),
        (
            "page_table",
            lambda x: x.astype(jnp.float32),
            r"page_table is float32\(2, 4\), needs int32",
        ),
        ("query_norm", lambda x: x[:4], r"query_norm is bfloat16\(4,\), needs bfloat16\(128,\)"),
    ],
)
def test_bad_calls(name, change, message):
    """The errors that users see: `unwrap` removes the check of annotations."""
    case = changed(make_case("int8", normed=True), NAMES, name, change)
    kernel = Target("mosaic_gpu", "NVIDIA H200", interpret=True)
    with use_target(kernel), pytest.raises(ValueError, match=message):
        inspect.unwrap(rotate_and_write)(*case.arguments, **case.options)

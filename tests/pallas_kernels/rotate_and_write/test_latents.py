"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import inspect

import jax.numpy as jnp
import pytest

from pallas_kernels.rotate_and_write import norm_and_write
from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.rotate_and_write.latents_suite import NormAndWriteSuite, make_case
from tests.pallas_kernels.rotate_and_write.suite import changed


class TestReference(NormAndWriteSuite):
    target = Target("reference", "cpu")


NAMES = ("pages", "down", "cosine", "sine", "page_table")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("down", lambda x: x[None], r"down is bfloat16\(1, 8, 448\), needs floats"),
        ("down", lambda x: x[:, 2:], r"down has 446 columns, and .* are of 256 \+ 128 \+ 64"),
        ("sine", lambda x: x[:, 1:], r"sine is float32\(8, 31\), needs float32\(8, 32\)"),
        ("latent_norm", lambda x: x.astype(jnp.float32), r"latent_norm is float32\(128,\)"),
        ("query_norm", lambda x: x[:4], r"of 4 \+ 128 \+ 64"),
        ("pages", lambda x: x[:1], r"pages are \['int8'\], need latents in floats, or in 8"),
        ("pages", lambda x: (x[0], x[1][1:]), r"pages\[1\] has shape \(5, 1, 8\), needs \(6, 1"),
        ("pages", lambda x: (x[0][..., 1:], x[1]), r"pages\[0\] has shape .*191\), needs .*192\)"),
        ("pages", lambda x: (x[0], x[1].astype(jnp.bfloat16)), "scales are bfloat16"),
        ("page_table", lambda x: x.astype(jnp.float32), r"page_table is float32\(2, 4\)"),
    ],
)
def test_bad_calls(name, change, message):
    """The errors that users see: `unwrap` removes the check of annotations."""
    case = changed(make_case("int8"), NAMES, name, change)
    kernel = Target("mosaic_gpu", "NVIDIA H200", interpret=True)
    with use_target(kernel), pytest.raises(ValueError, match=message):
        inspect.unwrap(norm_and_write)(*case.arguments, **case.options)


def test_no_kernel_for_tpus():
    """XLA fuses it there, and says nothing."""
    case = make_case("bfloat16")
    with use_target(Target("mosaic_tpu", "TPU v6 lite")):
        assert norm_and_write(*case.arguments, **case.options).row is None
        with pytest.raises(NotImplementedError, match="norms, rotation and writing"):
            norm_and_write(*case.arguments, **case.options, implementation="kernel")

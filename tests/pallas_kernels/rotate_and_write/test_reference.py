"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import inspect

import jax.numpy as jnp

from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.rotate_and_write.suite import RotateAndWriteSuite, changed, make_case


class TestReference(RotateAndWriteSuite):
    target = Target("reference", "cpu")


NAMES = ("pages", "query", "key", "value", "cosine", "sine", "page_table")


def test_bad_calls():
    """The errors that users see: `unwrap` removes the check of annotations."""

    def call(name, change):
        case = changed(make_case("int8", normed=True), NAMES, name, change)
        with use_target(Target("mosaic_gpu", "NVIDIA H200", interpret=True)):
            inspect.unwrap(rotate_and_write)(*case.arguments, **case.options)

    golden.check_arguments("pallas_kernels/rotate_and_write.txt", ValueError, call, {"jnp": jnp})

"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import inspect

import jax.numpy as jnp

from pallas_kernels.rotate_and_write import norm_and_write
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.pallas_kernels.rotate_and_write.latents_suite import NormAndWriteSuite, make_case
from tests.pallas_kernels.rotate_and_write.suite import changed


class TestReference(NormAndWriteSuite):
    target = Target("reference", "cpu")


NAMES = ("pages", "down", "cosine", "sine", "page_table")


def test_bad_calls():
    """The errors that users see: `unwrap` removes the check of annotations."""

    def call(name, change):
        case = changed(make_case("int8"), NAMES, name, change)
        with use_target(Target("mosaic_gpu", "NVIDIA H200", interpret=True)):
            inspect.unwrap(norm_and_write)(*case.arguments, **case.options)

    golden.check_arguments("pallas_kernels/norm_and_write.txt", ValueError, call, {"jnp": jnp})


def test_no_kernel_for_tpus():
    """XLA fuses it there, and says nothing."""
    case = make_case("bfloat16")
    with use_target(Target("mosaic_tpu", "TPU v6 lite")):
        assert norm_and_write(*case.arguments, **case.options).row is None

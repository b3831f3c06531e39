"""The errors that users see: what does not fit is named, with what is needed.

`unwrap` removes the check of annotations, which only tests run with.
"""

import inspect

import jax.numpy as jnp
import pytest

from pallas_kernels import attention, grouped_matmul, norm_quantize, quantize, sparse_attention
from pallas_kernels.attention import work_items
from pallas_kernels.gated_delta import api as delta
from pallas_kernels.grouped_matmul import routed
from pallas_kernels.quantize import QuantArray, scales_shape
from tests import golden


def ints(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def int8(*shape):
    return jnp.zeros(shape, jnp.int8)


WHERE = {"page_table": ints(1, 2), "sequence_of_token": ints(3), "position": ints(3)}
TOKENS = {"sequence_of_token": ints(3), "position": ints(3)}
FP8 = jnp.float8_e4m3fn
MODULES = attention, work_items, grouped_matmul, routed, norm_quantize, quantize, sparse_attention
OPS = {name: value for module in (*MODULES, delta) for name, value in vars(module).items()}
GOOD = dict(
    line.split("(", 1) for line in golden.text("pallas_kernels/good_calls.txt").splitlines()
)
"""Calls that fit: the arguments by the name of the op."""


def weight(values, scales, block=(4, 2)):
    return QuantArray(values, scales, block)


def made(dtype, block):
    """Weights of `grouped_matmul`."""
    values = jnp.zeros((2, 8, 256), dtype)
    return weight(values, jnp.ones(scales_shape(values.shape, block)), block)


def arguments(written):
    """The keyword arguments of a call whose name and first bracket are cut off."""
    return eval(f"dict({written}", globals())


def test_what_does_not_fit_is_named():
    """`golden/pallas_kernels/bad_calls.txt` lists the arguments that differ from those that fit."""

    def call(text):
        name, _, change = text.partition("(")
        inspect.unwrap(OPS[name])(**(arguments(GOOD[name]) | arguments(change)))

    golden.check_refused("pallas_kernels/bad_calls.txt", ValueError, call)


@pytest.mark.parametrize("function", GOOD)
def test_what_fits(function):
    inspect.unwrap(OPS[function])(**arguments(GOOD[function]))

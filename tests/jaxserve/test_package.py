"""Importing the package is free of side effects."""

import subprocess
import sys

import pytest

import jaxserve


def test_importing_the_package_loads_neither_jax_nor_a_layer() -> None:
    code = (
        "import sys, jaxserve; assert jaxserve.__version__; "
        "print(sorted(m for m in sys.modules if m.startswith(('jax', 'flax', 'msgspec'))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout == "['jaxserve']\n"


def test_the_sampling_parameters_are_handed_out() -> None:
    from jaxserve.engine.request import SamplingParams

    assert jaxserve.SamplingParams is SamplingParams
    assert dir(jaxserve) == ["LLM", "SamplingParams", "__version__"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = jaxserve.Nonsense

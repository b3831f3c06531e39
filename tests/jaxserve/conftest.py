"""Models and warm runtimes that several test files of a worker share."""

import pytest

from jaxserve.engine.build_runtime import build_runtime
from jaxserve.engine.runtime import Runtime, warm_up
from tests.jaxserve import layouts


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of the model of `layouts.py`."""
    return layouts.write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def colocated_runtime(tiny_model) -> Runtime:
    """Two lanes on one device. Whoever uses it leaves it idle."""
    return _warm(tiny_model, {**layouts.COLOCATED, "lanes": 2})


@pytest.fixture(scope="session")
def afd_runtime(tiny_model) -> Runtime:
    """1A1F with two lanes. Whoever uses it leaves it idle."""
    return _warm(tiny_model, {"lanes": 2})


def _warm(model, overrides) -> Runtime:
    runtime = build_runtime(layouts.deployment(model, overrides))
    warm_up(runtime)
    return runtime

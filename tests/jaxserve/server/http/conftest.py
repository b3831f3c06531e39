"""A fresh server for each test, and one for those that only ask."""

from collections.abc import Iterator

import pytest

from tests.jaxserve.server.http.rig import HttpRig


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    rig = HttpRig()
    yield rig
    rig.close()


@pytest.fixture
def wide(rig: HttpRig) -> HttpRig:
    """With room for tools in the prompt."""
    rig.engine.max_length = rig.generator._max_length = 2000
    return rig


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpRig]:
    """One for tests that leave nothing behind."""
    rig = HttpRig()
    yield rig
    rig.close()

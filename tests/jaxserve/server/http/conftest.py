"""A fresh server for each test."""

from collections.abc import Iterator

import pytest

from tests.jaxserve.server.http.rig import HttpRig


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    rig = HttpRig()
    yield rig
    rig.close()

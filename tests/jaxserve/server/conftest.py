"""Both faces of a server, open to everybody and with keys."""

from collections.abc import Iterator

import pytest

from jaxserve.server.access import Access, ApiKeys
from tests.jaxserve.server.faces import ALICE, BOB, Faces


@pytest.fixture
def faces() -> Iterator[Faces]:
    faces = Faces()
    yield faces
    faces.close()


@pytest.fixture
def locked() -> Iterator[Faces]:
    faces = Faces(Access(ApiKeys([ALICE, BOB])))
    yield faces
    faces.close()

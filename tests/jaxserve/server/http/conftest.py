"""A fresh server for each test, and one for those that only ask."""

import contextlib
from collections.abc import Iterator

import openai
import pytest

from tests.jaxserve.server.http.rig import SECONDS, HttpRig, Make


@pytest.fixture
def make_rig() -> Iterator[Make]:
    """Makes servers, which are closed after the test."""
    with contextlib.ExitStack() as rigs:
        yield lambda *given, **options: rigs.enter_context(
            contextlib.closing(HttpRig(*given, **options))
        )


@pytest.fixture
def rig(make_rig: Make) -> HttpRig:
    return make_rig()


@pytest.fixture
def wide(rig: HttpRig) -> HttpRig:
    """With room for tools in the prompt."""
    rig.engine.max_length = rig.generator._max_length = 2000
    return rig


@pytest.fixture
def sdk(rig: HttpRig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{rig.url}/v1", api_key="none", timeout=SECONDS, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def roomy() -> Iterator[HttpRig]:
    """One for all tests of a file, with room for tools in the prompt."""
    with contextlib.closing(HttpRig(max_length=3000)) as rig:
        yield rig


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpRig]:
    """One for tests that leave nothing behind."""
    with contextlib.closing(HttpRig()) as rig:
        yield rig

"""Errors that travel between processes."""

import pytest

from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)
from jaxserve.fleet.request_frames import Refusal

ERRORS = [
    InvalidRequestError("top_p", "must be at most 1"),
    OverloadedError("the queue is full", retry_after_s=2.5),
    CheckpointError("no index"),
    ConfigError("lanes: 9"),
    DrainingError("the engine drains"),
    EngineFailedError("process 1 is gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error: Exception) -> None:
    arrived = Refusal.of(error).error()
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert vars(arrived) == vars(error)


def test_another_one_keeps_its_name() -> None:
    arrived = Refusal.of(KeyError("a")).error()
    assert (type(arrived), str(arrived)) == (RuntimeError, "KeyError: 'a'")

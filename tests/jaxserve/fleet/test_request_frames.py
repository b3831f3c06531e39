"""Errors that travel between processes."""

import pytest

from jaxserve import errors
from jaxserve.fleet.request_frames import SentError

ERRORS = [
    errors.InvalidRequestError("top_p", "must be at most 1"),
    errors.OverloadedError("the queue is full", retry_after_s=2.5),
    errors.CheckpointError("no index"),
    errors.ConfigError("lanes: 9"),
    errors.DrainingError("the engine drains"),
    errors.EngineFailedError("process 1 is gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error: Exception) -> None:
    arrived = SentError.of(error).error()
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert vars(arrived) == vars(error)


def test_another_one_keeps_its_name() -> None:
    arrived = SentError.of(KeyError("a")).error()
    assert (type(arrived), str(arrived)) == (RuntimeError, "KeyError: 'a'")

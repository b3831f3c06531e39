import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from jaxserve.errors import (
    CheckpointError,
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)
from jaxserve.server.front_end import (
    AbortedError,
    DeadlineError,
    GrammarFailedError,
    NotReadyError,
    NoWorkerError,
    SlowReaderError,
)
from jaxserve.server.status import StatusError, status_error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidRequestError("top_p", "2 is not in (0, 1]"), "INVALID_ARGUMENT", "top_p: 2 is"),
        (OverloadedError("8 wait"), "RESOURCE_EXHAUSTED", "8 wait"),
        (DrainingError("shutting down"), "UNAVAILABLE", "shutting down"),
        (EngineFailedError("host a, pid 7"), "UNAVAILABLE", "the engine failed; request r1"),
        (NoWorkerError("none is left", "at a:1"), "UNAVAILABLE", "none is left; request r1"),
        (NotReadyError("starting"), "UNAVAILABLE", "starting"),
        (SlowReaderError("too slow"), "RESOURCE_EXHAUSTED", "too slow"),
        (AbortedError("aborted"), "CANCELLED", "aborted"),
        (DeadlineError("late"), "DEADLINE_EXCEEDED", "late"),
        (GrammarFailedError("structured_outputs", "no"), "INVALID_ARGUMENT", "structured_outputs"),
        (ValueError("secret"), "INTERNAL", "internal error; request r1"),
        (CheckpointError("path"), "INTERNAL", "internal error; request r1"),
        (StatusError(grpc.StatusCode.ABORTED, "so"), "ABORTED", "so"),
    ],
)
def test_statuses(error: Exception, code: str, message: str) -> None:
    status = status_error(error, "r1")
    assert status.code.name == code
    assert status.rich_status().details.startswith(message)


def detail_of(error: Exception) -> status_pb2.Status:
    ((key, value),) = status_error(error, "r1").rich_status().trailing_metadata
    assert key == "grpc-status-details-bin"
    return status_pb2.Status.FromString(value)


def test_the_field_is_a_detail() -> None:
    request = error_details_pb2.BadRequest()
    assert detail_of(InvalidRequestError("seed", "too big")).details[0].Unpack(request)
    (violation,) = request.field_violations
    assert (violation.field, violation.description) == ("seed", "too big")


def test_the_delay_is_a_detail() -> None:
    retry = error_details_pb2.RetryInfo()
    assert detail_of(OverloadedError("full", retry_after_s=2.5)).details[0].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)

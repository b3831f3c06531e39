from google.rpc import error_details_pb2, status_pb2

from jaxserve import errors
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.server import front_end, status
from jaxserve.server.status import status_error
from tests import golden


def test_statuses() -> None:
    def said(error: str) -> str:
        made = status_error(eval(error, vars(errors) | vars(front_end) | vars(status)), "r1")
        return f"{made.code.name}: {made.rich_status().details}"

    golden.check_each("server/statuses.txt", said)


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

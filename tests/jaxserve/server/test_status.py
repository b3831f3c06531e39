from google.rpc import error_details_pb2, status_pb2

from jaxserve import errors
from jaxserve.errors import OverloadedError
from jaxserve.server import front_end, inference
from jaxserve.server.inference import status_error
from tests import golden


def test_statuses() -> None:
    def said(error: str) -> str:
        made = status_error(eval(error, vars(errors) | vars(front_end) | vars(inference)), "r1")
        return f"{made.code.name}: {made.rich_status().details}"

    golden.check_each("server/statuses.txt", said)


def test_the_delay_is_a_detail() -> None:
    error = status_error(OverloadedError("full", retry_after_s=2.5), "r1")
    ((key, value),) = error.rich_status().trailing_metadata
    assert key == "grpc-status-details-bin"
    retry = error_details_pb2.RetryInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)

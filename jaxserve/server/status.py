"""Errors of jaxserve as gRPC statuses, with details that a client can act on.

Called by the gRPC service. Any other error is a bug of the server: the client gets INTERNAL and the
request id, the log the rest.
"""

import math

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.server.front_end import (
    AbortedError,
    DeadlineError,
    NotReadyError,
    NoWorkerError,
    SlowReaderError,
)


class StatusError(Exception):
    """A status that ends an RPC, other than for a failure of the server.

    Args:
      code: not OK.
      message: for the client.
      detail: a google.rpc message that goes with it.
      reason: by which it is counted, as HTTP's errors by their code; empty: the status.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        detail: Message | None = None,
        *,
        reason: str = "",
    ):
        super().__init__(message)
        self.reason = reason or code.name.lower()
        self.code = code
        self.message = message
        self.detail = detail

    def rich_status(self) -> grpc.Status:
        """The status with its detail in the trailing metadata, which grpcio-status reads."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            packed = any_pb2.Any()
            packed.Pack(self.detail)
            status.details.append(packed)
        return rpc_status.to_status(status)


def status_error(error: Exception, request_id: str) -> StatusError:
    """The status of an RPC that failed.

    The text of a failure of the server, which may name hosts, processes and files, is not in it.

    Args:
      error: why.
      request_id: by which the client can ask about it and the log is searched.
    """
    match error:
        case StatusError():
            return error
        case InvalidRequestError(field=field, message=message):
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message
            )
            detail = error_details_pb2.BadRequest(field_violations=[violation])
            return StatusError(
                grpc.StatusCode.INVALID_ARGUMENT, str(error), detail, reason="invalid_value"
            )
        case OverloadedError(retry_after_s=seconds):
            whole = math.floor(seconds)
            delay = duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
            retry = error_details_pb2.RetryInfo(retry_delay=delay)
            return StatusError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry, reason="overloaded"
            )
        case SlowReaderError():
            return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), reason="slow_reader")
        case NotReadyError():
            return StatusError(grpc.StatusCode.UNAVAILABLE, str(error), reason="starting")
        case DrainingError():
            return StatusError(grpc.StatusCode.UNAVAILABLE, str(error))
        case NoWorkerError(lost=lost):
            return StatusError(grpc.StatusCode.UNAVAILABLE, f"{lost}; request {request_id}")
        case EngineFailedError():
            message = f"the engine failed; request {request_id}"
            return StatusError(grpc.StatusCode.UNAVAILABLE, message)
        case AbortedError():
            return StatusError(grpc.StatusCode.CANCELLED, str(error), reason="aborted")
        case DeadlineError():
            return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error), reason="timeout")
        case _:
            return StatusError(grpc.StatusCode.INTERNAL, f"internal error; request {request_id}")

"""Errors of jaxserve as gRPC statuses, with details that a client can act on.

Called by the gRPC service. What is not in the table is a mistake of the server: the client gets
INTERNAL and the request id, the log gets the rest.
"""

import math

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import (
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
)


class StatusError(Exception):
    """A status that is the answer to an RPC, and no failure of the server.

    Args:
      code: not OK.
      message: for the client's eyes.
      detail: a google.rpc message that goes with it.
    """

    def __init__(self, code: grpc.StatusCode, message: str, detail: Message | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    def rich_status(self) -> grpc.Status:
        """The status with its detail in the trailing metadata, as grpcio-status reads it."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            packed = any_pb2.Any()
            packed.Pack(self.detail)
            status.details.append(packed)
        return rpc_status.to_status(status)


def status_error(error: Exception) -> StatusError | None:
    """The status of an error that is expected to reach clients; None for any other."""
    match error:
        case StatusError():
            return error
        case InvalidRequestError(field=field, message=message):
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message
            )
            detail = error_details_pb2.BadRequest(field_violations=[violation])
            return StatusError(grpc.StatusCode.INVALID_ARGUMENT, str(error), detail)
        case OverloadedError(retry_after_s=seconds):
            whole = math.floor(seconds)
            delay = duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
            retry = error_details_pb2.RetryInfo(retry_delay=delay)
            return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry)
        case DrainingError() | EngineFailedError():
            return StatusError(grpc.StatusCode.UNAVAILABLE, str(error))
        case _:
            return None

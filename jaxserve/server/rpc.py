"""The RPCs of `jaxserve.v1.Inference`, read from the descriptor of `jaxserve.proto`: the stub of
clients, and the handlers of the server.

Used by `grpc.py`, by `python -m jaxserve.generate --server` and by the load generators.
"""

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from jaxserve.server import jaxserve_pb2 as pb

INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"]
SERVICE: str = INFERENCE.full_name


class InferenceStub:
    """Has every RPC as a callable of its name.

    Args:
      channel: of `grpc`, or of `grpc.aio`, whose calls are awaited.
    """

    Generate: Any
    GenerateStream: Any
    Tokenize: Any
    Abort: Any
    GetModelInfo: Any

    def __init__(self, channel: Any):
        for method in INFERENCE.methods:
            call = channel.unary_stream if method.server_streaming else channel.unary_unary
            request, response = map(GetMessageClass, (method.input_type, method.output_type))
            path = f"/{SERVICE}/{method.name}"
            setattr(self, method.name, call(path, request.SerializeToString, response.FromString))


def inference_handlers(service: object) -> grpc.GenericRpcHandler:
    """Returns what a server dispatches RPCs to.

    Args:
      service: has a method of the name of every RPC.
    """
    handlers = {}
    for method in INFERENCE.methods:
        request, response = map(GetMessageClass, (method.input_type, method.output_type))
        kind: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            kind = grpc.unary_stream_rpc_method_handler
        handlers[method.name] = kind(
            getattr(service, method.name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)

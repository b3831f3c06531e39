"""Checks the API key of every RPC, and reads its message.

Used by `grpc.py`; `http/app.py` does the same for HTTP.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve.server.access import Access

OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
"""Services without a key, for health probes."""

tenant: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the current RPC's key."""


class Refusals:
    """Where RPCs that get an error are counted, by its reason.

    Attributes:
      count: takes the reason; nowhere until the server has metrics.
    """

    def __init__(self) -> None:
        self.count: Callable[[str], None] = lambda reason: None


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Hands None to the handler where a body is no message, so that the handler refuses it.

    gRPC itself would answer UNKNOWN, and log the failure with its stack.

    Args:
      service: whose handlers take None.
    """

    def __init__(self, service: str):
        self._service = service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the RPC's handler, with another reader of messages."""
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.strip("/").partition("/")[0]
        if handler is None or service != self._service or handler.request_deserializer is None:
            return handler  # without a reader it is `KeyInterceptor`'s refusal
        read = functools.partial(_message, handler.request_deserializer)
        return handler._replace(request_deserializer=read)


def _message(read: Callable[[bytes], Any], body: bytes) -> Any:
    """The message of a body, or None."""
    try:
        return read(body)
    except DecodeError:
        return None


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends every RPC without a key as UNAUTHENTICATED, health excepted.

    Args:
      access: has keys.
      refusals: where those without a key are counted.
    """

    def __init__(self, access: Access, refusals: Refusals):
        self._access = access
        self._refusals = refusals
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(_refuse)
        self._streaming_refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse_stream)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the RPC's handler, or one that refuses it."""
        service = handler_call_details.method.strip("/").partition("/")[0]
        if service in OPEN_SERVICES:
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        found = self._access.tenant(str(metadata.get("authorization", "")))
        handler = await continuation(handler_call_details)
        if found is not None:
            tenant.set(found)
            return handler
        self._refusals.count("invalid_api_key")
        if handler is not None and handler.response_streaming:
            return self._streaming_refusal
        return self._refusal


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "authorization: the API key is missing or wrong"
    )


async def _refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
    await _refuse(request, context)
    yield

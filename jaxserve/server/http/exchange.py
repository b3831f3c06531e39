"""One HTTP request and its response, which handlers read from and write to.

It limits the damage of clients that send too much, are slow or disconnect: bodies have a maximal
size and time, a response that the client does not read ends its connection, and a handler is
cancelled when its client disconnects. Made by `app.py` for every request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.errors import ErrorForm, HttpError, decoding_error
from jaxserve.server.http.foreign_fields import understood
from jaxserve.server.http.requests import Strict
from jaxserve.text.generation import checked_request_id, new_request_id

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 2**10
"""Most bytes of all headers of a request together."""
MAX_BODY_BYTES = 4 * 2**20
BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
STALL_SECONDS = 30.0
"""How long a client may leave a response unread."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
"""Headers of every response that does not set them itself: it is not a page, must not be framed by
one, and its address is not passed on as a referrer."""

JSON = "application/json"
Body = TypeVar("Body", bound=msgspec.Struct)


def headers_too_large(what: str) -> HttpError:
    """The refusal of a request with too many or too long headers."""
    return HttpError(431, f"headers: {what}", code="headers_too_large", headers=_CLOSE)


class ClientGone(Exception):
    """The client closed the connection or stopped reading; no response can be sent."""


class HttpExchange:
    """One request and its response.

    Attributes:
      scope: ASGI's.
      headers: of the request.
      request_id: the client's X-Request-Id, or a random one; sent back and logged.
      tenant: of the request's API key.
      idempotency_key: by which the client may come back for the answer; empty: none.
      asked: path and body of a request with such a key, written in one way.
      status: of the response once it has begun; else 0.
      log: further fields of the access log.
      reason: code of the error that ended it; None without one.
      error_form: whose API it calls, as errors are written.
      left_out: called with the name of an unknown field of the body; None: it is an error.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.request_id = _request_id(self.headers.get("x-request-id"))
        self.tenant = ""
        self.idempotency_key = self.headers.get("idempotency-key", "")
        self.asked = b""
        self.status = 0
        self.log: dict[str, Any] = {}
        self.reason: str | None = None
        self.error_form: ErrorForm = "openai"
        self.left_out: Callable[[str], None] | None = None
        self.arrival = time.monotonic()
        self._receive = receive
        self._send = send
        self._connection = scope.get("state", {}).get("connection")
        self._gone = False

    def check_headers(self) -> None:
        """Refuses too many headers, and a body with two lengths: a proxy and this server could
        take different bytes for the next request (RFC 9112 §6.3, request smuggling).

        Raises:
          HttpError: there are too many (431) or two lengths (400); the connection ends.
        """
        if len(self.headers) > MAX_HEADERS:
            raise headers_too_large(f"{len(self.headers)}, at most {MAX_HEADERS}")
        size = sum(len(name) + len(value) for name, value in self.headers.raw)
        if size > MAX_HEADER_BYTES:
            raise headers_too_large(f"{size} bytes, at most {MAX_HEADER_BYTES}")
        if "transfer-encoding" in self.headers and "content-length" in self.headers:
            raise HttpError(
                400, "both transfer-encoding and content-length say a length", headers=_CLOSE
            )

    def check_json(self) -> None:
        """Refuses any other content type: a web page can send others to any server unasked.

        Raises:
          HttpError: the content type is not JSON (415).
        """
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, f"content-type: expected {JSON}", code="unsupported_media_type")

    async def read(self, kind: type[Body]) -> Body:
        """The JSON body as a struct.

        Raises:
          HttpError: it is too large (413), too slow (408), or its content type is not JSON (415).
          InvalidRequestError: it is not JSON, or a field is wrong, which is named.
          ClientGone: the client disconnected before it was complete.
        """
        self.check_json()
        body = await self._body()
        try:
            if self.idempotency_key:
                fields = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
                self.asked = f"{self.scope['path']}\n".encode() + fields
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if not issubclass(kind, Strict):  # of this server's own routes
                raise decoding_error(error, body) from None
            return understood(body, kind, self.left_out)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise decoding_error(error, body) from None

    def rename(self, request_id: str | None) -> None:
        """Takes the request id from the body, if it has one.

        Raises:
          InvalidRequestError: it is not a valid id.
        """
        if request_id is not None:
            self.request_id = checked_request_id(request_id)

    async def reply(
        self,
        answer: msgspec.Struct | bytes,
        *,
        status: int = 200,
        media_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends a complete response."""
        body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        await self._start(status, media_type, {"Content-Length": str(len(body)), **(headers or {})})
        await self._write({"type": "http.response.body", "body": body})

    async def start_events(self) -> None:
        """Begins a response of server-sent events."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        await self._start(200, "text/event-stream", headers)

    async def event(self, data: bytes, name: str = "") -> None:
        """Sends an event; `data` must not contain newlines."""
        body = b"data: " + data + b"\n\n"
        if name:
            body = f"event: {name}\n".encode() + body
        if self._connection is not None and self._connection.send_part(body):
            return
        await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        """Ends the response."""
        await self._write({"type": "http.response.body"})

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels the block when the client disconnects.

        The body must have been read before, and the response must end after the block.

        Raises:
          ClientGone: it disconnected.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if self._gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def gone(self) -> None:
        """Waits until the connection is closed, for a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_SECONDS):
                while (await self._receive())["type"] != "http.disconnect":
                    pass

    def hang_up(self) -> None:
        """Aborts the connection, discarding unsent data."""
        if self._connection is not None:
            self._connection.transport.abort()

    async def _watch(self, task: "asyncio.Task[object]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        task.cancel()

    async def _body(self) -> bytes:
        declared = self.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > MAX_BODY_BYTES:
                        raise _too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {BODY_SECONDS:g} s", headers=_CLOSE
            ) from None

    async def _start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self.status = status
        everything = {"Content-Type": media_type, "X-Request-Id": self.request_id, **headers}
        pairs = [(k.lower().encode(), v.encode()) for k, v in everything.items()]
        named = {name for name, _ in pairs}
        pairs += [pair for pair in SECURITY_HEADERS if pair[0] not in named]
        await self._write({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, message: Message) -> None:
        if self._connection is not None and not self._connection.flow.write_paused:
            await self._send(message)  # which will not wait
            return
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._send(message)
        except TimeoutError:
            self.hang_up()
            raise ClientGone from None


_CLOSE = {"Connection": "close"}


def _too_large() -> HttpError:
    # The connection stays open for the rest (`server.py`): a client that is still sending would
    # lose the answer with it.
    return HttpError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="too_large")


def _request_id(given: str | None) -> str:
    """The client's id if it is valid, else a random one."""
    if given is None:
        return new_request_id()
    try:
        return checked_request_id(given)
    except InvalidRequestError:
        return new_request_id()

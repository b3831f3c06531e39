"""Errors of jaxserve as HTTP statuses with a body in OpenAI's format.

`inference.py` does the same for gRPC. Any other error is a bug of the server: the client gets 500
and the request id, the log the rest. Called by `app.py`.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException

from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from jaxserve.server.front_end import (
    AbortedError,
    DeadlineError,
    GrammarFailedError,
    NotReadyError,
    NoWorkerError,
)
from jaxserve.server.http.responses import Error, ErrorDetail, MessageError, MessageErrorDetail

_RETRY = {"Retry-After": "5"}

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "aborted_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Status → OpenAI's type of the error."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status → Anthropic's type of the error."""

ErrorForm = Literal["openai", "anthropic"]


class HttpError(Exception):
    """A status that ends a request, other than for a failure of the server.

    Args:
      status: 400 to 599.
      message: for the client.
      param: the field at fault.
      code: for programs.
      headers: in addition to the usual ones.
      details: for programs, in the form of Anthropic's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details

    def body(self, form: ErrorForm = "openai", request_id: str = "") -> bytes:
        """The answer's body, in the form of whose API was called."""
        if form == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            wrong = MessageErrorDetail(type=kind, message=self.message, details=self.details)
            return msgspec.json.encode(MessageError(error=wrong, request_id=request_id))
        kind = TYPES.get(self.status, "invalid_request_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return msgspec.json.encode(Error(error=detail))


def http_error(error: Exception, request_id: str) -> HttpError:
    """The response to a request that failed.

    The text of a failure of the server, which may name hosts, processes and files, is not in it.

    Args:
      error: why.
      request_id: by which the client can ask about it and the log is searched.
    """
    match error:
        case HttpError():
            return error
        case HTTPException():  # the router's: another method is needed
            headers = dict(error.headers or {})
            return HttpError(error.status_code, error.detail, code="wrong_method", headers=headers)
        case GrammarFailedError(message=message):
            return HttpError(400, f"structured output: {message}", code="grammar_failed")
        case InvalidRequestError(field=field):
            return HttpError(400, str(error), param=field, code="invalid_value")
        case OverloadedError(retry_after_s=seconds):
            headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
            return HttpError(429, str(error), code="overloaded", headers=headers)
        case NotReadyError():
            return HttpError(503, str(error), code="starting")
        case DrainingError():
            return HttpError(503, str(error), code="unavailable", headers=_RETRY)
        case NoWorkerError(lost=lost):
            message = f"{lost}; request {request_id}"
            return HttpError(503, message, code="unavailable", headers=_RETRY)
        case EngineFailedError():
            message = f"the engine failed; request {request_id}"
            return HttpError(503, message, code="unavailable", headers=_RETRY)
        case AbortedError():
            return HttpError(499, str(error), code="aborted")
        case DeadlineError():
            return HttpError(504, "the request ran for too long", code="timeout")
        case _:
            return HttpError(500, f"internal error; request {request_id}", code="internal")


PLACE = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
LONE_SURROGATE = re.compile(rb"(?i)\\u(?:d[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..\\u)d[c-f])")
"""Half of a character beyond 16 bits, as clients send that cut texts by JavaScript's length."""
STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]")
MAX_KEYS = 8
"""Wrong keys that are shown."""
MAX_SHOWN = 60
"""Characters of a wrong value that are shown."""


def decoding_error(error: Exception, body: bytes) -> InvalidRequestError:
    """Translates a decoding error of msgspec; names the field, the value and the range.

    Args:
      error: of msgspec, or RecursionError.
      body: that was decoded.
    """
    if isinstance(error, RecursionError):
        return InvalidRequestError("body", "is nested too deeply")
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        half = "; \\uD800 to \\uDFFF stand in pairs" if LONE_SURROGATE.search(body) else ""
        return InvalidRequestError("body", f"is no JSON: {message}{half}")
    path, of_key = "", False
    if place := PLACE.search(message):
        message, path = message[: place.start()], place["path"]
        of_key = place[0].startswith(" - at `key` in")
    field = path.removeprefix(".").replace("[...]", "")  # msgspec's word for any key
    if unknown := UNKNOWN.match(message):
        name = unknown["name"][:MAX_SHOWN]
        return InvalidRequestError(f"{field}.{name}" if field else name, "is not known here")
    if missing := _MISSING.match(message):
        name = missing["name"]
        return InvalidRequestError(f"{field}.{name}" if field else name, "is missing")
    if of_key and message.startswith("Expected `int`"):
        return InvalidRequestError(field, _wrong_keys(body, path))
    known = field and ", got " not in message and "[...]" not in path
    shown = _value_at(body, path) if known else ""
    return InvalidRequestError(field or "body", message[0].lower() + message[1:] + shown)


def _wrong_keys(body: bytes, path: str) -> str:
    """Describes the keys that are no integers, of the object at msgspec's path."""
    keys = [key for key in _at(body, path) if not key.removeprefix("-").isdecimal()]
    shown = [msgspec.json.encode(key[:MAX_SHOWN]).decode() for key in keys[:MAX_KEYS]]
    return f"expected `int` keys, got {', '.join(shown)}"


def _at(body: bytes, path: str) -> Any:
    """The value at msgspec's path; raises LookupError, TypeError where that leads nowhere."""
    value: Any = msgspec.json.decode(body)
    for step in STEP.finditer(path):
        value = value[step["name"] if step["name"] is not None else int(step["index"])]
    return value


def _value_at(body: bytes, path: str) -> str:
    """`, got 7` for the value at msgspec's path; empty where the path leads nowhere."""
    try:
        value = _at(body, path)
    except (LookupError, TypeError, msgspec.DecodeError):  # 1e999 is no number of its own
        return ""
    if isinstance(value, dict | list):
        return ""
    text = msgspec.json.encode(value).decode()
    return f", got {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '…'}"

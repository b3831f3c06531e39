"""Parts of messages between a router and a worker (`worker_frames.py`), and ids of requests.

Used by the faces, too, which have no workers.
"""

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineFailedError,
    InvalidRequestError,
    JaxserveError,
    OverloadedError,
)

KEY = "key-"
"""Prefix of the id of a request that its client may send again, to any router, for the rest."""


def keyed_id(owner: str, key: str, asked: bytes) -> str:
    """The id of a request with a key.

    Args:
      owner: the tenant whose key it is.
      key: chosen by the client.
      asked: everything that the client asks for. The id holds its digest, so that a request with
        the same key and other parameters never gets this one's answer.
    """
    name = hashlib.blake2s(f"{owner}\n{key}".encode(), digest_size=16).hexdigest()
    return f"{KEY}{name}-{hashlib.blake2s(asked, digest_size=16).hexdigest()}"


def has_key(request_id: str) -> bool:
    """Whether a request id was made by `keyed_id`."""
    return request_id.startswith(KEY)


def check_unused(request_id: str, live: Collection[str], kept: Iterable[str] = ()) -> None:
    """Checks the id of a new request against the ids in use.

    Args:
      live: ids of requests that run.
      kept: ids of requests with keys whose router is gone; their clients may come back for them.

    Raises:
      InvalidRequestError: the id is in use, or its key, for other parameters.
    """
    if request_id in live:
        raise InvalidRequestError("request_id", f"{request_id!r} is already running")
    request = request_id.partition(".")[0]
    key = request.rpartition("-")[0]
    if has_key(request_id) and any(
        one.startswith(key) and not one.startswith(request) for one in (*live, *kept)
    ):
        raise InvalidRequestError("request_id", "the same key came with other parameters")


def seed_of_key(request_id: str) -> int:
    """The seed of a request with a key whose client gave none: the same when it comes again."""
    digest = hashlib.blake2s(request_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Frame(msgspec.Struct, tag=True, array_like=True):
    """Base of all frames."""


class Outputs(Frame):
    """The new tokens of requests, in order."""

    outputs: list[TokenOutput]


class Cancel(Frame):
    """Cancels a request of the sender; its last output is the only answer."""

    request_id: str


class GrammarOf(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar in its first state, as it is sent; see `TokenGrammar`.

    Attributes:
      serialised: the input of llguidance's compiler; empty: no grammar.
    """

    serialised: str = ""
    begins_after: bytes = b""


NO_GRAMMAR = GrammarOf()


def without_grammar(params: SamplingParams) -> tuple[SamplingParams, GrammarOf]:
    """Sampling parameters that can be sent, and the grammar beside them."""
    grammar: Any = params.grammar
    if grammar is None:
        return params, NO_GRAMMAR
    sent = msgspec.structs.replace(params, grammar=None)
    return sent, GrammarOf(grammar.serialised, grammar.begins_after)


class SentError(msgspec.Struct, omit_defaults=True):
    """An error, as it is sent between processes."""

    kind: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: Exception) -> "SentError":
        """Returns the form in which an error is sent."""
        match error:
            case InvalidRequestError(field=field, message=message):
                return cls("InvalidRequestError", message, field=field)
            case OverloadedError(retry_after_s=seconds):
                return cls("OverloadedError", str(error), retry_after_s=seconds)
            case _:
                return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """The error; RuntimeError for kinds that are not jaxserve's."""
        match self.kind:
            case "InvalidRequestError":
                return InvalidRequestError(self.field, self.message)
            case "OverloadedError":
                return OverloadedError(self.message, self.retry_after_s)
            case kind if kind in _ERRORS:
                return _ERRORS[kind](self.message)
            case kind:
                return RuntimeError(f"{kind}: {self.message}")


_ERRORS: dict[str, type[JaxserveError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, DrainingError, EngineFailedError)
}

KNOWN = frozenset({*_ERRORS, "InvalidRequestError", "OverloadedError"})
"""Kinds of errors that are not a bug of the server."""

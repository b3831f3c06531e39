"""Objects below a `gs://` or `s3://` URL, read in ranges by TensorStore.

Called by `mirror.py`, the readers of `checkpoint/` and the compilation cache. Every request is
retried for half a minute and has a deadline; errors say what to do about them. Credentials come
from the machine or its environment, as for the vendors' own tools. AWS_ENDPOINT_URL_S3,
AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST name another server.
"""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import CheckpointError

SCHEMES = {"gs": "gcs", "s3": "s3"}
"""Scheme of a URL → TensorStore's driver."""

ANSWER_SECONDS = 120.0
"""Deadline of a request, including its retries."""
LEAST_BYTES_PER_SECOND = 1 << 20
"""Slowest transfer rate: a request's deadline grows by its size over this."""

_RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "8s"}
_REQUESTS = {"limit": 64}
"""Concurrent requests per driver."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the service "
    "account of this machine",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the role of this machine",
}


def is_url(folder: str | Path) -> bool:
    """Whether this names a folder in a bucket."""
    return isinstance(folder, str) and folder.partition("://")[0] in SCHEMES and "://" in folder


class ByteSpan(NamedTuple):
    """A range of bytes of an object, `stop` excluded; `stop` None: to the end."""

    name: str
    start: int = 0
    stop: int | None = None


class ReadPart(NamedTuple):
    """Bytes that were read, and the version (generation) of their object."""

    data: bytes
    generation: str


class StorageBucket:
    """The objects below a URL.

    Args:
      url: `gs://bucket/path` or `s3://bucket/path`.
      seconds: deadline of a request, without the time for its bytes; 0: `ANSWER_SECONDS`.

    Raises:
      CheckpointError: the URL has no bucket.
    """

    def __init__(self, url: str, seconds: float = 0.0):
        import tensorstore

        self._seconds = seconds or ANSWER_SECONDS

        self.url = url.rstrip("/") if url.partition("://")[2].strip("/") else url
        self._store = self._answer(
            tensorstore.KvStore.open(kvstore(self.url), context=context()), self.url
        )

    def names(self) -> list[str]:
        """The objects' names, without the URL.

        Raises:
          CheckpointError: they cannot be listed.
        """
        return sorted(name.decode() for name in self._answer(self._store.list(), self.url))

    def read(self, spans: Sequence[ByteSpan]) -> list[ReadPart | None]:
        """Reads the spans concurrently; None for objects that do not exist.

        Raises:
          CheckpointError: a span cannot be read, or its object ends before it.
        """
        asked = []
        for span in spans:
            part = slice(span.start, span.stop) if span.start or span.stop is not None else None
            asked.append(self._store.read(span.name, byte_range=part))
        size = sum(span.stop - span.start for span in spans if span.stop is not None)
        parts: list[ReadPart | None] = []
        for span, future in zip(spans, asked, strict=True):
            found = self._answer(future, f"{self.url}/{span.name}", size)
            there = found.state == "value"
            parts.append(ReadPart(found.value, found.stamp.generation.hex()) if there else None)
        return parts

    def write(self, name: str, data: bytes | None) -> None:
        """Writes an object, whole or not at all; None: deletes it, if it is there.

        Raises:
          CheckpointError: it cannot be written.
        """
        self._answer(self._store.write(name, data), f"{self.url}/{name}", len(data or b""))

    def _answer(self, future: Any, what: str, size: int = 0) -> Any:
        """Waits for the result of a request; the deadline grows with `size` in bytes. Raises
        CheckpointError if the request fails or misses it."""
        seconds = self._seconds + size / LEAST_BYTES_PER_SECOND
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            raise CheckpointError(f"{what}: no answer within {seconds:g} s") from None
        except ValueError as error:
            raise CheckpointError(problem(what, error)) from None


def kvstore(url: str) -> dict[str, Any]:
    """TensorStore's description of a folder in a bucket.

    Raises:
      CheckpointError: the URL has no bucket.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise CheckpointError(
            f"{url}: expected {scheme}://BUCKET/PATH, and {bucket!r} is no bucket's name"
        )
    path = path.strip("/")
    spec: dict[str, Any] = {
        "driver": SCHEMES[scheme],
        "bucket": bucket,
        "path": f"{path}/" if path else "",
    }
    if scheme == "gs":
        if own := os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", own)
        return spec
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    return spec


@functools.cache
def context() -> Any:
    """TensorStore's context for all requests to buckets: shared connections, retries and limits."""
    import tensorstore

    both = {f"{driver}_request_retries": _RETRIES for driver in SCHEMES.values()}
    limits = {f"{driver}_request_concurrency": _REQUESTS for driver in SCHEMES.values()}
    return tensorstore.Context(both | limits)


def problem(what: str, error: Exception) -> str:
    """Describes TensorStore's error in one line, with advice.

    Args:
      what: the URL that was requested.
    """
    text = " ".join(str(error).split("[http_response_body")[0].split())
    code = text.partition(":")[0]
    scheme, _, rest = what.partition("://")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or "AccessDenied" in text:
        return (
            f"{what}: no permission ({text}); this process needs to list and read it: "
            f"{_CREDENTIALS.get(scheme, '')}"
        )
    if code == "NOT_FOUND":
        return f"{what}: there is no bucket {rest.partition('/')[0]} ({text})"
    if code == "OUT_OF_RANGE":
        return f"{what} is shorter than it was, or truncated ({text})"
    return f"{what} cannot be read: {text}"

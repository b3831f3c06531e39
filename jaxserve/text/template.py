"""Chat templates, rendered by Jinja2 in a process of its own.

`Template` is one template; all of them share the process (`template_worker.py`), which starts with
the first one, is replaced when it dies or takes too long, and ends with this one. Called by
`chat.py`. Knows nothing of messages, tokenizers or models.
"""

import functools
import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.text.template_worker import LENGTH, receive

ANSWER_SECONDS = 20.0
"""For one rendering, by the clock. The worker ends one itself after a time on the CPU; this is for
a machine that is very busy, and for a worker that is stuck."""

_WORKER = Path(__file__).with_name("template_worker.py")

logger = logging.getLogger(__name__)


class TemplateError(Exception):
    """The template is invalid, exceeded a limit or failed on its inputs; says where."""


class TemplateRefusal(Exception):
    """The template called `raise_exception`; has the template's message."""


class Template:
    """A template, checked once. Safe for many threads.

    Attributes:
      source: as given.
      variables: the names that it reads and does not set, other than functions.
    """

    def __init__(self, source: str):
        """Parses a template.

        Raises:
          TemplateError: it cannot be parsed.
        """
        self.source = source
        self.variables = frozenset(_worker().ask(source, None)["variables"])

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for JSON values, as `plain` makes them.

        Raises:
          TemplateError, TemplateRefusal
        """
        return _worker().ask(self.source, values)["text"]


class _Worker:
    """The process that renders. Safe for many threads, which take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._stop: Any = None

    def ask(self, source: str, values: Mapping[str, Any] | None) -> Any:
        """The worker's answer; raises TemplateError, TemplateRefusal."""
        request = json.dumps({"source": source, "values": values}).encode()
        with self._lock:
            try:
                answer = json.loads(self._answer(request))
            except (OSError, EOFError) as error:
                self._stop()
                self._peer = None
                logger.warning("the process that renders chat templates is replaced: %s", error)
                raise TemplateError("it took too much time or memory") from None
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer

    def _answer(self, request: bytes) -> bytes:
        peer = self._peer or self._start()
        peer.sendall(LENGTH.pack(len(request)) + request)
        (size,) = LENGTH.unpack(receive(peer, LENGTH.size))
        return receive(peer, size)

    def _start(self) -> socket.socket:
        self._peer, theirs = socket.socketpair()
        self._peer.settimeout(ANSWER_SECONDS)
        with theirs:
            # Isolated: neither the environment nor the current folder decides what it imports.
            command = [sys.executable, "-I", str(_WORKER)]
            nothing: dict[str, str] = {}
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=nothing
            )
        self._stop = weakref.finalize(self, _end, process, self._peer)
        return self._peer


def _end(process: subprocess.Popen[bytes], peer: socket.socket) -> None:
    peer.close()
    process.kill()
    process.wait()


_worker = functools.cache(_Worker)


def plain(value: Any, *, name: str, depth: int = 64) -> Any:
    """A copy of JSON data, checked.

    Raises:
      ValueError: names the part that is not JSON, not valid Unicode, or nested too deeply.
    """
    if depth == 0:
        raise ValueError(f"{name}: is nested too deeply")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name}: the key {key!r} is no text")
        return {
            _text(key, name): plain(item, name=f"{name}.{key}", depth=depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            plain(item, name=f"{name}[{index}]", depth=depth - 1)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str):
        return _text(value, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{name}: {type(value).__name__} is no JSON value")


def _text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: no Unicode text: lone surrogate at {error.start}") from None
    return str(text)

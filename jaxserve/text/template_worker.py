"""A process that renders chat templates with Jinja2, as transformers does, within limits.

Templates are programs that come with a model (or, where that is allowed, with a request). Jinja2's
sandbox keeps them from Python's objects; this process keeps them from everything else: it has no
network and no environment, may write no file, and its memory and the time of a rendering are
bounded. Started by `template.py` with a socket as its standard input; ends when that is closed.

A frame is four bytes of length and JSON. A request has `source` and `values` (null: only parse);
the answer has one of `text`, `variables`, `refusal` (what the template raised) and `error`.
"""

import datetime
import functools
import json
import math
import resource
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 2**29
CPU_SECONDS = 2.0
"""Of one rendering; an ordinary one takes less than a millisecond."""
MAX_CHARACTERS = 2**25
KEPT = 16
"""Compiled templates."""
LENGTH = struct.Struct("!I")
FILE = "<template>"


class OutOfTime(BaseException):
    """The rendering takes too long; not an Exception, which Jinja2 may catch."""


class Refusal(Exception):
    """The template called `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the model's own text for training: here only a scope."""

    tags = {"generation"}  # noqa: RUF012  (Jinja2's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, without the HTML escapes of Jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any = "") -> None:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.Environment:
    # transformers' is immutable besides; here a template changes only its own copy of the values.
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "from_json": json.loads}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


ENVIRONMENT = _environment()


@functools.lru_cache(KEPT)
def _compiled(source: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(source)


def _variables(source: str) -> list[str]:
    """The names that a template reads and does not set, other than functions."""
    found = jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(source))
    return sorted(found - set(ENVIRONMENT.globals))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Serves one request; whatever goes wrong becomes its answer."""
    source, values = request["source"], request["values"]
    try:
        compiled = _compiled(source)
        if values is None:
            return {"variables": _variables(source)}
        text = compiled.render(values)
    except Refusal as refusal:
        return {"refusal": str(refusal)}
    except OutOfTime:
        return {"error": f"it took more than {CPU_SECONDS:g} s"}
    except MemoryError:
        return {"error": f"it took more than {MEMORY_BYTES >> 20} MiB"}
    except RecursionError:
        return {"error": "it calls itself too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        line = _line(error.__traceback__)
        return {"error": f"line {line}: {error}" if line else f"{type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it wrote more than {MAX_CHARACTERS} characters"}
    return {"text": text}


def _line(traceback: types.TracebackType | None) -> int:
    """The template's line that failed; 0 if none is known."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == FILE:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _limit_time() -> None:
    """For the next rendering; one that does not hear the signal ends with the process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    most = math.ceil(time.process_time() + 2 * CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _out_of_time(number: int, frame: types.FrameType | None) -> None:
    raise OutOfTime


def receive(peer: socket.socket, size: int) -> bytes:
    """Reads so many bytes; raises EOFError where the other end is closed before."""
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError("it ended")
        data += part
    return bytes(data)


def main() -> int:
    """Serves the socket at standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the server ends this process
    signal.signal(signal.SIGPROF, _out_of_time)
    _limit()
    peer = socket.socket(fileno=0)
    while True:
        reply: dict[str, Any]
        try:
            body = receive(peer, *LENGTH.unpack(receive(peer, LENGTH.size)))
        except EOFError:
            return 0
        try:
            _limit_time()
            reply = answer(json.loads(body))
            signal.setitimer(signal.ITIMER_PROF, 0)
        except OutOfTime:
            reply = {"error": f"it took more than {CPU_SECONDS:g} s"}
        except MemoryError:
            reply = {"error": f"it took more than {MEMORY_BYTES >> 20} MiB"}
        written = json.dumps(reply).encode()
        peer.sendall(LENGTH.pack(len(written)) + written)


if __name__ == "__main__":
    sys.exit(main())

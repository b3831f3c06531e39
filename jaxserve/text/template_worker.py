"""Renders chat templates with Jinja2, as transformers does.

Templates are programs that come with a model (or, where that is allowed, with a request). Jinja2's
sandbox keeps them from Python's objects; the process (`limited_worker.py`) keeps them from
everything else.

A request has `source` and `values` (null: only parse). The answer has one of `text`, `variables`,
`refusal` (the message that the template raised) and `error`.
"""

import datetime
import functools
import json
import traceback
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_CHARACTERS = 2**25
KEPT = 16
"""Number of compiled templates that are cached."""
FILE = "<template>"


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
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
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, without the HTML escapes of Jinja2's own filter. It takes no other options of
    `json.dumps`, which would call a template's `default` or `cls` outside the sandbox."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.Environment:
    # transformers' is immutable besides; here a template changes only its own copy of the values.
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
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
    except TemplateRefusal as refusal:
        return {"refusal": str(refusal)}
    except MemoryError:
        raise
    except RecursionError:
        return {"error": "it calls itself too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        line = _line(error)
        return {"error": f"line {line}: {error}" if line else f"{type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it wrote more than {MAX_CHARACTERS} characters"}
    return {"text": text}


def _line(error: Exception) -> int:
    """The template's line that failed; 0 if none is known."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == FILE), 0)

"""One chat template, rendered by minijinja as transformers renders it with Jinja2.

Templates come with a model and are programs: here they run a bounded number of steps, without
access to files or to Python objects other than their inputs. Their memory is not bounded (a few
steps can double a text many times), so serve only model folders whose authors you trust.
Called by `chat.py`. Knows nothing of messages, tokenizers or models.

Known differences from Jinja2 that raise no error: an undefined value inside a list or an object
is `null` to `tojson`, and is `in` every string; a loop over none is empty; `varargs` and `kwargs`
of macros are undefined; floats of 1e16 and more or below 1e-4 print without an exponent; a whole
float written in the template itself has no `.0` in `tojson`; the filter `trim` leaves U+001C to
U+001F; `escape` writes `&#x27;` and `&quot;`; `sort`, `min` and `max` take mixed types.
"""

import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

import minijinja

from jaxserve.text.jinja_source import CALL_METHOD, METHODS, REVERSED, UNDEFINED, translate

STEPS = 2_000_000
"""Instructions that one rendering may take; an ordinary message takes about a hundred."""

MAX_INDENT = 200
"""Spaces that the filter `indent` puts before a line."""

FUNCTIONS = frozenset({"raise_exception", "strftime_now", CALL_METHOD, UNDEFINED})
"""Functions that this module adds to those of minijinja."""

_OWN_FUNCTIONS = frozenset({"namespace", "range", "dict", "debug", "cycler", "joiner", "loop"})


class TemplateError(Exception):
    """The template is invalid, took too many steps or failed on its inputs; says where."""


class TemplateRefusal(Exception):
    """The template called `raise_exception`; has the template's message."""


class Template:
    """A template, parsed once. Safe for many threads.

    Attributes:
      variables: the names that it reads and does not set, other than functions.
    """

    def __init__(self, source: str):
        """Parses a template.

        Raises:
          TemplateError: it cannot be parsed.
        """
        self._environment = minijinja.Environment(
            fuel=STEPS,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda name: False,
            filters={"indent": _indent, "tojson": _tojson},
            tests=_TESTS,
            globals={
                "raise_exception": _raise_exception,
                "strftime_now": _strftime_now,
                CALL_METHOD: _call_method,
                UNDEFINED: _UNDEFINED,
            },
        )
        self._source = translate(source)
        try:
            names = self._environment.undeclared_variables_in_str(self._source)
        except minijinja.TemplateError as error:
            raise TemplateError(_describe(error)) from None
        self.variables = frozenset(names) - FUNCTIONS - _OWN_FUNCTIONS

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for JSON values made by `plain`.

        Raises:
          TemplateError, TemplateRefusal
        """
        try:
            return self._environment.render_str(self._source, "template", **values)
        except minijinja.TemplateError as error:
            raise TemplateError(_describe(error)) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Raised by the functions below on arguments that they do not accept.
            raise TemplateError(str(error)) from None


class _WholeFloat:
    """A float without a fraction, which minijinja would hand to `tojson` as an integer."""

    def __init__(self, value: float):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class _Undefined:
    """An undefined value, for the functions below."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)


_UNDEFINED = _Undefined()


def plain(value: Any, *, name: str, depth: int = 64) -> Any:
    """A copy of JSON data, which the template may change.

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
    if isinstance(value, float) and value.is_integer():
        return _WholeFloat(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{name}: {type(value).__name__} is no JSON value")


def _text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: no Unicode text: lone surrogate at {error.start}") from None
    return str(text)


def _describe(error: minijinja.TemplateError) -> str:
    if error.kind == "OutOfFuel":
        return f"line {error.line}: it took more than {STEPS} steps"
    message = error.detail or error.message
    return f"line {error.line}: {message}" if error.line else message


# ------------------------------------------------------------ what templates call


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers: plain JSON, without Jinja2's HTML escapes."""
    if isinstance(value, _Undefined):
        raise TypeError("tojson: the value is undefined")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_json_default,
    )


def _json_default(value: Any) -> Any:
    if isinstance(value, _WholeFloat):
        return value.value
    raise TypeError(f"tojson: {type(value).__name__} is no JSON value")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja2's filter; minijinja's drops a trailing newline."""
    prefix = width if isinstance(width, str) else " " * min(width, MAX_INDENT)
    top, *lines = (text + "\n").splitlines()
    lines = [prefix + line if line or blank else line for line in lines]
    return (prefix if first else "") + "\n".join([top, *lines])


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _call_method(value: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
    """A method of a string or a list, or its reverse."""
    if name == REVERSED and isinstance(value, str | list | tuple):
        return value[::-1]
    known = isinstance(value, str) or (
        isinstance(value, list | tuple) and name in ("count", "index")
    )
    if not known or name not in METHODS:
        raise TypeError(f"{type(value).__name__} has no method {name}")
    return getattr(value, name)(*arguments, **keywords)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


_TESTS = {
    "sequence": _is_sequence,
    "iterable": lambda value: hasattr(value, "__iter__"),
    "number": lambda value: isinstance(value, int | float | _WholeFloat),
    "float": lambda value: isinstance(value, float | _WholeFloat),
}

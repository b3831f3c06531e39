"""Jinja2 set up as transformers sets it up for chat templates: the oracle of the template tests."""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: a scope whose text is the model's."""

    tags = {"generation"}  # noqa: RUF012  (Jinja2's own spelling)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("body_of")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def body_of(self, caller: Any) -> str:
        return caller()


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def jinja2_render(source: str, values: Mapping[str, Any]) -> str:
    """The text that transformers would make of a template."""
    return _compiled(source).render(**values)


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)

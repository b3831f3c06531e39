"""Jinja2 set up as transformers sets it up for chat templates: the oracle of the template tests."""

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def jinja2_render(source: str, values: Mapping[str, Any]) -> str:
    """The text that transformers would make of a template."""
    return _compiled(source).render(**values)


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # transformers' own tag is a scope that changes no text, as this filter is.
    scope = re.sub(r"\bgeneration(?= *-?%})", "filter string", source)
    return environment.from_string(scope.replace("endgeneration", "endfilter"))

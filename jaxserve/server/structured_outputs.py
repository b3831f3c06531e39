"""The structured outputs that clients ask for, as grammars for `GrammarCompiler.compiled`.

Called by the handlers of both faces, whose requests have the field `structured_outputs`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from jaxserve.errors import InvalidRequestError
from jaxserve.text import structured
from jaxserve.text.structured import Form, GrammarError

FIELD = "structured_outputs"
"""The request field of both faces that asks for one."""
MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}


def form(asked: Mapping[str, Any], *, close: bool = False) -> tuple[str, Form]:
    """The request field of the structured output that a client asks for, and its grammar.

    Args:
      asked: `json` (a schema, or its text), `json_object` (True), `regex`, `choice` (texts) and
        `grammar` (Lark's, or EBNF), `structural_tag` (vLLM's, or its text); exactly one is set.
      close: whether a schema's objects are `closed`.

    Raises:
      InvalidRequestError: none is set, or several, or there are no or too many choices.
    """
    given = [name for name, value in asked.items() if value is not None and value is not False]
    if len(given) != 1:
        raise InvalidRequestError(FIELD, f"set one of {', '.join(asked)}")
    (name,) = given
    value = asked[name]
    if name == "choice" and not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequestError(f"{FIELD}.choice", f"{len(value)} texts, not 1 to {MAX_CHOICES}")
    forms: dict[str, Form] = {
        "json": lambda: structured.json_schema(closed(value) if close else value),
        "json_object": lambda: structured.json_schema(ANY_OBJECT),
        "regex": lambda: structured.regex(value),
        "choice": lambda: structured.choice(value),
        "grammar": lambda: structured.lark(value),
        "structural_tag": lambda: structured.structural_tags(_tags(value)),
    }
    return f"{FIELD}.{name}", forms[name]


def closed(schema: Any) -> Any:
    """Closes every object of a JSON schema, or of its text, that leaves further properties open.

    Raises:
      GrammarError: `allOf` joins several schemas, which would exclude each other's properties.
    """
    try:
        return _closed(json.loads(schema) if isinstance(schema, str) else schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _closed(schema: Any) -> Any:
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return list(map(_closed, schema))
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if isinstance(joined := made.get("allOf"), list) and len(joined) > 1:
        raise GrammarError("allOf of several schemas cannot be strict")
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(parts := made.get(key), dict):
            made[key] = {name: _closed(part) for name, part in parts.items()}
    for key in ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"):
        if key in made:
            made[key] = _closed(made[key])
    if "properties" in made or made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def _tags(asked: Any) -> list[llguidance.StructTag]:
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [text]}`, or its JSON text."""
    try:
        found = json.loads(asked) if isinstance(asked, str) else asked
        return [
            llguidance.StructTag(
                trigger=next(mark for mark in found["triggers"] if one["begin"].startswith(mark)),
                begin=one["begin"],
                grammar=one["schema"],
                end=one["end"],
            )
            for one in found["structures"]
        ]
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration, RecursionError):
        raise GrammarError(
            "expected structures with begin (that starts with one of the triggers), schema and end"
        ) from None

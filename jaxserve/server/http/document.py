"""The OpenAPI document, generated from the table of routes and the types of their bodies.

Served at /openapi.json, and for people at /docs. Called by `app.py`.
"""

import html
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

import jaxserve
from jaxserve.server.http.requests import Strict
from jaxserve.server.http.responses import Error, MessageError
from jaxserve.server.http.routes import Endpoint

STATUS_TEXTS = {
    200: "OK",
    400: "A field is wrong; param names it",
    401: "The API key is missing or wrong",
    403: "The Host header is not this machine's",
    404: "It is not here: the model, the request, the experts",
    408: "The body did not arrive in time",
    409: "It cannot be done now: the same is under way, or its key came with other parameters",
    413: "The body is too large",
    415: "The body is not said to be JSON",
    429: "Too many requests; Retry-After says when to come back",
    499: "The request was aborted",
    500: "A mistake of the server",
    503: "Starting, draining or failed",
    504: "The request ran for too long",
}


def document(endpoints: Sequence[Endpoint], *, keys: bool) -> bytes:
    """The document as JSON.

    Args:
      endpoints: the routes.
      keys: whether clients have to show an API key.
    """
    types: set[type[msgspec.Struct]] = {Error, MessageError}
    for endpoint in endpoints:
        types |= {
            kind
            for kind in (endpoint.takes, endpoint.gives, endpoint.streams)
            if kind is not None and not isinstance(kind, str)
        }
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for kind in _below(Strict):  # whose nulls stand for missing fields
        _allow_nulls(schemas.get(kind.__name__, {}))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, keys)
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(whole)


def _below(kind: type) -> set[type]:
    """Returns all classes that inherit from one."""
    own: set[type] = set(kind.__subclasses__())
    return own.union(*map(_below, own))


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Lets fields that may be missing be null, too."""
    for name, field in schema.get("properties", {}).items():
        kinds = field.get("anyOf", [{key: field[key] for key in field if key != "default"}])
        if name not in schema.get("required", ()) and {"type": "null"} not in kinds:
            default = {key: field[key] for key in field if key == "default"}
            schema["properties"][name] = {"anyOf": [*kinds, {"type": "null"}], **default}


PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""The Content-Security-Policy of the page: it loads nothing and runs nothing."""

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:13px/1.4 ui-monospace,monospace}pre{overflow:auto;max-height:30rem}"
    "summary{cursor:pointer}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
)


def document_page(document: bytes) -> bytes:
    """The document as a page: routes, and folded the schemas of their bodies."""
    whole = json.loads(document)
    parts = []
    for path, operations in whole["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {})
            answers = operation["responses"]
            parts.append(
                f"<details><summary><code>{method.upper()} {html.escape(path)}</code> "
                f"{html.escape(operation['summary'])}</summary>"
                + _pretty({"requestBody": body, "responses": answers} if body else answers)
                + "</details>"
            )
    schemas = [
        f'<details id="{html.escape(name)}"><summary><code>{html.escape(name)}</code></summary>'
        f"{_pretty(schema)}</details>"
        for name, schema in whole["components"]["schemas"].items()
    ]
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jaxserve</title>'
        f"<style>{_STYLE}</style><h1>jaxserve {html.escape(whole['info']['version'])}</h1>"
        f"<p>For programs: <a href=/openapi.json>/openapi.json</a></p>{''.join(parts)}"
        f"<h2>Bodies</h2>{''.join(schemas)}</html>"
    )
    return text.encode()


def _pretty(value: Any) -> str:
    return f"<pre>{html.escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _operation(endpoint: Endpoint, keys: bool) -> dict[str, Any]:
    gives = endpoint.gives
    if isinstance(gives, str):
        content: dict[str, Any] = {gives: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _reference(gives)}}
    if endpoint.streams is not None:
        data = f"A {endpoint.streams.__name__} as JSON; at last [DONE], or an Error"
        event = {"data": {"type": "string", "description": data}}
        content["text/event-stream"] = {
            "schema": {"type": "object", "required": ["data"], "properties": event}
        }
    responses = {"200": {"description": STATUS_TEXTS[200], "content": content}}
    failure = MessageError if endpoint.errors == "anthropic" else Error
    secured = keys and not endpoint.public
    for status in sorted({*endpoint.statuses, 500, *([401] if secured else [])}):
        responses[str(status)] = {
            "description": STATUS_TEXTS[status],
            "content": {"application/json": {"schema": _reference(failure)}},
        }
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "responses": responses,
    }
    if names := re.findall(r"\{(\w+)\}", endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.takes is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(endpoint.takes)}},
        }
    if secured:
        operation["security"] = [{"key": []}]
    return operation


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}

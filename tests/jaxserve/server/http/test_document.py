"""The OpenAPI document, and schemathesis against the server by it."""

import json
from collections.abc import Iterator

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from jaxserve.server.http.document import document
from jaxserve.server.http.requests import CompletionRequest
from jaxserve.server.http.routes import ENDPOINTS
from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.text.fake_engine import pipeline_view

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SPECIFIC = (
    *("model", "request_id", "suffix", "best_of", "skip_special_tokens", "top_logprobs"),
    *("tool_choice", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"),
    *("structured_outputs", "response_format", "cache_salt", "min_tokens"),
    *("stop_sequences", "thinking", "output_config"),
    *("store", "background", "previous_response_id", "conversation", "prompt"),
)
"""Fields whose right values no schema knows; without them more requests reach the engine."""

DOCUMENT = json.loads(document(ENDPOINTS, keys=False))
LONG = 512


def without_long_lists(part):
    """The document without limits that a list exceeds only in a body that is too large itself."""
    if isinstance(part, list):
        return [without_long_lists(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept = {key: without_long_lists(one) for key, one in part.items()}
    if isinstance(kept.get("maxItems"), int) and kept["maxItems"] > LONG:
        del kept["maxItems"]
    return kept


schema = schemathesis.openapi.from_dict(without_long_lists(DOCUMENT))


@pytest.fixture(scope="module")
def patient() -> Iterator[HttpRig]:
    """A rig whose engine is quick, for many requests."""
    rig = HttpRig()
    rig.engine.chunk = 16
    rig.engine.view = pipeline_view(24)
    yield rig
    assert len(rig.engine.prompts) > 10  # not everything was refused
    rig.close()


@schema.include(path_regex="^/(v1|tokenize|detokenize|version|pipeline)").parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_server_does_what_the_document_says(case, patient: HttpRig) -> None:
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        for field in SPECIFIC:
            case.body.pop(field, None)
    case.call_and_validate(base_url=patient.url, checks=CHECKS, timeout=20)
    assert patient.engine.wait_until_idle()


def test_every_route_is_in_it(shared: HttpRig) -> None:
    served = shared.client.get("/openapi.json").json()
    assert served["openapi"] == "3.1.0"
    hidden = {"/openapi.json", "/docs"}
    assert set(served["paths"]) == {endpoint.path for endpoint in ENDPOINTS} - hidden
    assert {"/v1/completions", "/v1/messages", "/v1/models/{model}"} < set(served["paths"])


def test_every_field_is_in_it() -> None:
    properties = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(properties) == {field.name for field in msgspec.structs.fields(CompletionRequest)}
    assert DOCUMENT["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


def test_keys_are_in_it() -> None:
    with_keys = json.loads(document(ENDPOINTS, keys=True))
    completions = with_keys["paths"]["/v1/completions"]["post"]
    assert completions["security"] == [{"key": []}]
    assert "401" in completions["responses"]
    assert "security" not in with_keys["paths"]["/health"]["get"]
    assert "security" not in DOCUMENT["paths"]["/v1/completions"]["post"]


def test_the_page_for_people_loads_nothing(shared: HttpRig) -> None:
    response = shared.client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "script" not in response.headers["content-security-policy"]
    assert "<code>POST /v1/messages</code> Answer a conversation" in response.text
    assert '<details id="ChatRequest">' in response.text
    assert "<script" not in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text

"""Wrong fields of every path: the error names the field, and the engine sees no request."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.server.http.test_forms import TOOLS
from tests.jaxserve.server.http.test_responses import TOOL

REFUSALS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/completions": [
        ({"prompt": ""}, "prompt: expected `str` of length >= 1"),
        ({"prompt": []}, "prompt: expected `array` of length >= 1"),
        ({"prompt": [[]]}, "prompt: is empty"),
        ({"prompt": ["a", ""]}, "prompt[1]: expected `str` of length >= 1"),
        ({"prompt": [3, "a"]}, "prompt: mixes texts, token ids and lists"),
        ({"prompt": [3, 300]}, "prompt[1]: token id 300 is not in [0, 299]"),
        ({"prompt": [-1]}, "prompt[0]: expected `int` >= 0, got -1"),
        ({"prompt": "x" * 1999}, "prompt: 2000 tokens leave no room for an output"),
        ({"prompt": None}, "prompt: expected `str | array`, got `null`"),
        ({"prompt": ["a"] * 65, "n": 2}, "n: 65 prompts and n = 2: at most 128 choices"),
        ({"max_tokens": 0}, "max_tokens: 0 needs echo = true"),
        ({"max_tokens": "7"}, "max_tokens: expected `int | null`, got `str`"),
        ({"max_tokens": 10**30}, "max_tokens: got 1"),
        ({"min_tokens": 17}, "min_tokens: 17 is not in [0, 16] (max_tokens)"),
        ({"temperature": -1}, "temperature: expected `float` >= 0.0, got -1"),
        ({"temperature": 2.5}, "temperature: expected `float` <= 2.0, got 2.5"),
        ({"top_p": 0}, "top_p: expected `float` > 0.0, got 0"),
        ({"min_p": 2}, "min_p: expected `float` <= 1.0, got 2"),
        ({"top_k": -2}, "top_k: expected `int` >= -1, got -2"),
        ({"seed": 2**63}, "seed: expected `int` <= 9223372036854775807"),
        ({"n": 0}, "n: expected `int` >= 1, got 0"),
        ({"best_of": 2}, "best_of: 2 is not n = 1"),
        ({"stop": ""}, 'stop: expected `str` of length >= 1, got ""'),
        ({"stop": ["x" * 257]}, "stop[0]: expected `str` of length <= 256"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]: expected `int` >= 0, got -1"),
        ({"logit_bias": {"5": 101}}, "logit_bias: expected `float` <= 100.0"),
        ({"logit_bias": {"5": 1, "x": 1, "y": 2}}, 'logit_bias: keys, got "x", "y"'),
        ({"presence_penalty": 3}, "presence_penalty: expected `float` <= 2.0, got 3"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected `float` > 0.0, got 0"),
        ({"suffix": "x"}, "suffix: is not supported"),
        ({"skip_special_tokens": 7}, "skip_special_tokens: expected `bool | null`, got `int`"),
        ({"cache_salt": "x" * 257}, "cache_salt: expected `str` of length <= 200"),
        ({"request_id": "é"}, "request_id: must be 1 to 128 printable ASCII"),
        ({"stream_options": {"x": 1}}, "stream_options.x: is not known here"),
        ({"best": 1}, "best: is not known here"),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": ["x"]}, "messages[0]: expected `object`, got `str`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type: 'image_url' is not supported",
        ),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, "messages: no room"),
        ({"top_logprobs": 3}, "top_logprobs: needs logprobs = true"),
        ({"tool_choice": "auto!"}, "tool_choice: invalid enum value"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"function_call": "x"}, "function_call: invalid enum value"),
        ({"function_cal": "x"}, "function_cal: is not known here"),
        ({"response_format": {"type": "xml"}}, "response_format.type: invalid enum value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format.json_schema.schema: ",
        ),
        ({"structured_outputs": {}}, "structured_outputs: set one of json, json_object, regex"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs: set one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: length >= 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs: set one of them",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name: 'x' is no tool",
        ),
    ],
    "/v1/responses": [
        ({"store": True}, "store: keeps no responses"),
        ({"background": True}, "background: keeps no responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: keeps no responses"),
        ({"conversation": "conv_1"}, "conversation: keeps no responses"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: invalid enum value"),
        ({"truncation": "first"}, "truncation: invalid enum value"),
        ({"top_logprobs": 21}, "top_logprobs: <= 20"),
        ({"include": ["file_search_call.results"]}, "include[0]: invalid enum value"),
        ({"n": 2}, "n: is not known here"),
        ({"temperature": 3}, "temperature: <= 2.0"),
        ({"max_output_tokens": 0}, "max_output_tokens: >= 1"),
        ({"input": []}, "input: length >= 1"),
        ({"input": [{"role": "user"}]}, "input[0].content: is missing"),
        ({"input": [{"role": "root", "content": "x"}]}, "input[0].role: invalid enum value"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type: is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type: invalid enum value",
        ),
        ({"input": "x" * 2100}, "input: no room"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "y"}},
            "tool_choice.name: 'y' is no tool",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: is missing"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}},
            "text.format.schema: ",
        ),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: no switch"),
    ],
    "/tokenize": [
        ({}, "prompt: "),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt: "),
        ({"prompt": ""}, "prompt: "),
        ({"prompt": "x" * 2001}, "prompt: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: "),
    ],
    "/detokenize": [({}, "tokens: "), ({"tokens": [3, -1]}, "tokens[1]: ")],
}
"""Path → fields, with the error's field and a part of its message."""


@pytest.fixture(scope="module")
def rig() -> Iterator[HttpRig]:
    """With room for tools in the prompt."""
    rig = HttpRig(max_length=2000)
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [(path, fields, told) for path, rows in REFUSALS.items() for fields, told in rows],
)
def test_a_bad_field_is_named(rig: HttpRig, path: str, fields: dict[str, Any], told: str) -> None:
    error = rig.refused(path, **fields)
    param, _, part = told.partition(": ")
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"].startswith(f"{param}: ")
    assert part in error["message"]
    assert rig.engine.prompts == []

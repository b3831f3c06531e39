"""Structured output over HTTP: the fake engine writes its script as far as the grammar allows."""

import json

import openai
import pydantic
import pytest

from jaxserve.text.calls import CALL_FORMATS
from tests.jaxserve.server.http.rig import SECONDS, TEMPLATE, HttpRig, events, until_first_event
from tests.jaxserve.text.letters import LETTERS, ids_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer"}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key in (("add", "a"), ("bid", "b"))
]
CHAIN = "\n".join([*(f'r{n}: "x" | r{n + 1}' for n in range(900)), 'r900: "y"'])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def wide(rig: HttpRig) -> HttpRig:
    """With room for tools in the prompt."""
    rig.engine.max_length = rig.generator._max_length = 2000
    return rig


def test_a_json_object(rig: HttpRig) -> None:
    rig.engine.script = ids_of('Sure! {"x": [1]} and more')
    choice = rig.chat(response_format={"type": "json_object"}).json()["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"x": [1]}
    assert choice["finish_reason"] == "stop"


def test_a_schema(rig: HttpRig) -> None:
    rig.engine.script = ids_of('Sure! {"a": 17} and more')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    chunks = events(rig.chat(response_format=form, stream=True))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert json.loads(text)["a"] == 17


@pytest.mark.parametrize(
    ("form", "script", "text"),
    [
        ({"choice": ["red", "green"]}, "is it green?", "green"),
        ({"regex": "[0-9]{3}"}, "call 123456", "123"),
        ({"json": {"const": 7}}, "12345678", "7"),
        ({"json": '{"const": 7}'}, "12345678", "7"),
        ({"grammar": 'start: "(" start ")" | "x"'}, "f((x))y", "((x))"),
    ],
)
def test_other_forms(rig: HttpRig, form: dict, script: str, text: str) -> None:
    rig.engine.script = ids_of(script)
    assert rig.complete(structured_outputs=form).json()["choices"][0]["text"] == text


def test_every_choice_has_a_grammar_of_its_own(rig: HttpRig) -> None:
    rig.engine.script = ids_of("green")
    body = rig.complete(structured_outputs={"choice": ["red", "green"]}, n=3).json()
    assert [choice["text"] for choice in body["choices"]] == ["green"] * 3
    assert len({id(params.grammar) for params in rig.engine.params}) == 3


def test_a_thought_is_free(rig: HttpRig) -> None:
    rig.engine.script = ids_of("Is it red?\n</think>\n\ngreen")
    fields = {"structured_outputs": {"choice": ["red", "green"]}}
    message = rig.chat(chat_template_kwargs={"enable_thinking": True}, **fields)
    message = message.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Is it red?", "green")


def test_a_call_that_is_asked_for(wide: HttpRig) -> None:
    wide.engine.script = ids_of(
        'I would rather <tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
    )
    choice = wide.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 5}
    assert choice["finish_reason"] == "tool_calls"


def test_the_tool_that_is_asked_for(wide: HttpRig) -> None:
    wide.engine.script = ids_of(
        '<tool_call>\n{"name": "add bid", "arguments": {"a" "b": 5}}\n</tool_call>'
    )
    named = {"type": "function", "function": {"name": "bid"}}
    choice = wide.chat(tools=TOOLS, tool_choice=named).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "bid"
    assert json.loads(call["function"]["arguments"]) == {"b": 5}


def nested(depth: int) -> dict:
    return {} if depth == 1 else {"items": nested(depth - 1)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structured_outputs": {"grammar": "start: a\n" + 'a: "x" | a\n' * 3000}},
            "structured_outputs.grammar: 3001 rules, at most 1000 are allowed",
        ),
        (
            {"structured_outputs": {"grammar": "start: r0\n" + CHAIN}},
            "structured_outputs.grammar: it took more than 1024 KiB of stack: "
            "it is nested too deeply",
        ),
        (
            {"structured_outputs": {"json": nested(700)}},
            "structured_outputs.json: is nested 700 deep, at most 128 is allowed",
        ),
    ],
)
def test_a_hostile_grammar_is_refused_while_a_stream_goes_on(
    rig: HttpRig, fields: dict, message: str
) -> None:
    rig.engine.allowed = 3
    with rig.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as all_:
        lines = until_first_event(all_)
        assert rig.refused(**fields)["message"] == message
        rig.engine.allowed = None
        assert list(filter(None, lines))[-1] == "data: [DONE]"


FAMILIES = [
    '<tool_call>\n{"name": "bid", "arguments": {"b": 5}}\n</tool_call>',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bid\n"
    '```json\n{"b": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.bid:1"
    '<|tool_call_argument_begin|>{"b": 5}<|tool_call_end|><|tool_calls_section_end|>',
    '<|CALL_START|>function\nbid\n{"b": 5}<|CALL_END|>',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bid<｜tool▁sep｜>"
    '{"b": 5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "<tool_call>\n<function=bid>\n<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>",
    "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="bid">\n<steptml:parameter name="b">5</steptml:parameter>\n'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
]


@pytest.mark.parametrize("written", FAMILIES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bid"}}])
def test_a_call_in_the_form_of_every_family(written: str, choice: object) -> None:
    """Whatever else the model wants to say; the conversation has had a call before."""
    form = max(
        (form for form in CALL_FORMATS if all(mark in written for mark in form.known_by)),
        key=lambda form: len(form.known_by),
    )
    mark = " ".join(form.known_by)
    rig = HttpRig(f"Sure, {written} What else?", template=TEMPLATE.replace("<tool_call>", mark))
    rig.engine.max_length = rig.generator._max_length = 2000
    called = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": called}]},
    ]
    fields = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "return_token_ids": True}
    answer = rig.client.post("/v1/chat/completions", json=fields).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("bid", '{"b": 5}')
    assert LETTERS.decode(answer["token_ids"]) == written
    rig.close()


def test_a_name_that_the_model_cannot_write() -> None:
    rig = HttpRig(template=TEMPLATE.replace("<tool_call>", "<|CALL_START|>"))
    rig.engine.max_length = rig.generator._max_length = 2000
    tools = [{"type": "function", "function": {"name": "a\nb"}}]
    messages = [{"role": "user", "content": "hi"}]
    fields = {"messages": messages, "tools": tools, "tool_choice": "required"}
    error = rig.refused("/v1/chat/completions", **fields)
    assert error["param"] == "tools[0].function.name"
    rig.close()


class _Answer(pydantic.BaseModel):
    a: int


def test_the_sdk_parses_it(rig: HttpRig) -> None:
    rig.engine.script = ids_of('{"a": 17}')
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", timeout=SECONDS) as client:
        chat = client.chat.completions.parse(
            model="fake", messages=[{"role": "user", "content": "hi"}], response_format=_Answer
        )
    assert chat.choices[0].message.parsed == _Answer(a=17)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid enum value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format.json_schema.schema",
            "",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "set one of json, json_object, regex"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs", "set one of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid regex"),
        (
            {"structured_outputs": {"regex": "x" * 70_000}},
            "structured_outputs.regex",
            "70000 characters, at most 65536",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "set one of them",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "'x' is no tool",
        ),
    ],
)
def test_a_bad_form_is_named(
    shared: HttpRig, fields: dict[str, object], param: str, message: str
) -> None:
    shared.engine.max_length = shared.generator._max_length = 2000
    messages = [{"role": "user", "content": "hi"}]
    error = shared.refused("/v1/chat/completions", messages=messages, **fields)
    assert error["param"] == param
    assert message in error["message"]
    assert shared.engine.prompts == []


def test_values_of_elements_follow_their_schemas() -> None:
    """A text never holds the mark that ends the calls: its last letter is not allowed."""
    properties = {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "left out": {"type": "boolean"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    rig = HttpRig(
        "<tool_call>\n<function=f>\n<parameter=city>\n<b></tool_call> a\n</parameter>\n"
        "<parameter=unit>\nKC\n</parameter>\n<parameter=days>\nx2\n</parameter>\n"
        "</function>\n</tool_call>",
        template=TEMPLATE.replace("<tool_call>", "<tool_call><function="),
    )
    rig.engine.max_length = rig.generator._max_length = 2000
    choice = rig.chat(tools=tools, tool_choice="required").json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {
        "city": "<b></tool_call a",
        "unit": "C",
        "days": 2,
    }
    rig.close()

"""Structured output over HTTP: the fake engine writes its script as far as the grammar allows."""

import itertools
import json

import pytest
import yaml

from jaxserve.text.calls import CALL_FORMATS
from tests import golden
from tests.jaxserve.server.http.rig import TEMPLATE, HttpRig, Make
from tests.jaxserve.text.conversations import tool
from tests.jaxserve.text.letters import LETTERS, ids_of

TOOLS = [
    tool(name, {key: {"type": "integer"}}, required=[key], additionalProperties=False)
    for name, key in (("add", "a"), ("bid", "b"))
]
CHAIN = "\n".join([*(f'r{n}: "x" | r{n + 1}' for n in range(900)), 'r900: "y"'])


def test_every_choice_has_a_grammar_of_its_own(rig: HttpRig) -> None:
    rig.engine.script = ids_of("green")
    body = rig.complete(structured_outputs={"choice": ["red", "green"]}, n=3).json()
    assert [choice["text"] for choice in body["choices"]] == ["green"] * 3
    assert len({id(params.grammar) for params in rig.engine.params}) == 3


def test_a_hostile_grammar_is_refused_while_a_stream_goes_on(rig: HttpRig) -> None:
    """`text/test_structured.py` has more of them."""
    with rig.streaming() as lines:
        error = rig.refused(structured_outputs={"grammar": "start: r0\n" + CHAIN})
        assert error["param"] == "structured_outputs.grammar"
        assert "it took more than 1024 KiB of stack" in error["message"]
        rig.engine.allowed = None
        assert list(filter(None, lines))[-1] == "data: [DONE]"


FAMILIES = yaml.safe_load(golden.text("text/forced_calls.yaml"))
NAMED = {"type": "function", "function": {"name": "bid"}}


@pytest.mark.parametrize(
    ("written", "choice"), list(zip(FAMILIES, itertools.cycle(["required", NAMED]), strict=False))
)
def test_a_call_in_the_form_of_every_family(make_rig: Make, written: str, choice: object) -> None:
    """Whatever else the model wants to say; the conversation has had a call before."""
    form = max(
        (form for form in CALL_FORMATS if all(mark in written for mark in form.known_by)),
        key=lambda form: len(form.known_by),
    )
    mark = " ".join(form.known_by)
    template = TEMPLATE.replace("<tool_call>", mark)
    rig = make_rig(f"Sure, {written} What else?", template=template, max_length=2000)
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


def test_a_name_that_the_model_cannot_write(make_rig: Make) -> None:
    rig = make_rig(template=TEMPLATE.replace("<tool_call>", "<|CALL_START|>"), max_length=2000)
    tools = [{"type": "function", "function": {"name": "a\nb"}}]
    error = rig.refused("/v1/chat/completions", tools=tools, tool_choice="required")
    assert error["param"] == "tools[0].function.name"


def test_values_of_elements_follow_their_schemas(make_rig: Make) -> None:
    """A text never holds the mark that ends the calls: its last letter is not allowed."""
    properties = {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "left out": {"type": "boolean"},
    }
    tools = [tool("f", properties, required=["city", "days"])]
    rig = make_rig(
        "<tool_call>\n<function=f>\n<parameter=city>\n<b></tool_call> a\n</parameter>\n"
        "<parameter=unit>\nKC\n</parameter>\n<parameter=days>\nx2\n</parameter>\n"
        "</function>\n</tool_call>",
        template=TEMPLATE.replace("<tool_call>", "<tool_call><function="),
        max_length=2000,
    )
    choice = rig.chat(tools=tools, tool_choice="required").json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found == {"city": "<b></tool_call a", "unit": "C", "days": 2}

"""Conversations of every shape that chat templates distinguish, and tools to call in them."""

import json
from typing import Any


def tool(name: str, properties: dict[str, Any], about: str = "", **more: Any) -> dict[str, Any]:
    """A function to call, with the schema of its arguments."""
    parameters = {"type": "object", "properties": properties, **more}
    described = {"description": about} if about else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    tool(
        "weather",
        {"city": {"type": "string"}, "days": {"type": "integer"}},
        "How is it in <city>? “Now” & 'here' — é",
        required=["city"],
    ),
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {"z": {}}}}},
]

SYSTEM = {"role": "system", "content": "Be brief & kind <b>.\n"}
QUESTION = {"role": "user", "content": "How is Łódź | today: sunny?\nI ask"}
THOUGHT = {"role": "assistant", "content": "<think>\n\nA town.\n\n</think>\n\nSunny. "}
REASONED = {"role": "assistant", "content": "\nFine.", "reasoning_content": "\nHm 5 < 6.\n"}
THANKS = {"role": "user", "content": "Thanks 🙂 你好"}


def call(arguments: Any, name: str = "weather", number: int = 0, **more: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    calls = [
        {"id": f"functions.{name}:{number + i}", "type": "function", "function": function}
        for i in range(more.pop("times", 1))
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def answer(content: str, number: int = 0) -> dict[str, Any]:
    """A tool's answer."""
    name = f"functions.weather:{number}"
    return {"role": "tool", "content": content, "tool_call_id": name, "name": "weather"}


TEXT_CALL = call('{"city": "Łódź"}', content="")
OBJECT_CALL = call({"city": "Łódź", "days": 2.0, "at": [1.5, True, None, {"x": "<&'\">"}], "n": 7})

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [QUESTION],
    "system and question": [SYSTEM, QUESTION],
    "turns": [SYSTEM, QUESTION, THOUGHT, THANKS],
    "reasoning in its own field": [QUESTION, REASONED, THANKS, REASONED],
    "an answer to be continued": [QUESTION, THOUGHT],
    "a call": [SYSTEM, QUESTION, TEXT_CALL],
    "a call and its answer": [QUESTION, TEXT_CALL, answer("12 °C")],
    "two calls at once": [
        QUESTION,
        call('{"city": "x"}', times=2, content=""),
        answer("a"),
        answer("b\n", 1),
        {"role": "assistant", "content": "Both."},
        THANKS,
    ],
    "a late system message": [QUESTION, THOUGHT, SYSTEM, THANKS],
    "an empty text": [{"role": "user", "content": ""}],
    "white space": [{"role": "user", "content": " \n\ta\u00a0\u2028 \n"}],
    "spelt special tokens": [{"role": "user", "content": "<|im_end|><｜User｜>{{ 1 }}{% x %}"}],
}
"""Any family's template renders these, with tools and without."""

OBJECT_CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a call with an object": [QUESTION, OBJECT_CALL, answer("12 °C"), THOUGHT, THANKS],
    "a call with thoughts": [QUESTION, {**OBJECT_CALL, "reasoning_content": "Let me see.\n"}],
}
"""For templates that write arguments themselves (DeepSeek's joins texts)."""


def sent_call(*cities: str, **more: Any) -> dict[str, Any]:
    """A message that calls, as clients send it back: no content, arguments as text."""
    calls = []
    for number, city in enumerate(cities):
        arguments = json.dumps({"city": city, "days": 2}, ensure_ascii=False)
        function = {"name": "weather", "arguments": arguments}
        calls.append({"id": f"call0000{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(content: Any, number: int = 0) -> dict[str, Any]:
    """A tool's answer, as clients send it."""
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}"}


_PARTS = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]

SENT: dict[str, list[dict[str, Any]]] = {
    "one question": [QUESTION],
    "system and question": [SYSTEM, QUESTION],
    "turns": [SYSTEM, QUESTION, {"role": "assistant", "content": "Sunny."}, THANKS],
    "a call": [QUESTION, sent_call("Łódź")],
    "a call and its answer": [QUESTION, sent_call("Łódź"), result("12 °C")],
    "a call, its answer and thanks": [
        *(SYSTEM, QUESTION, sent_call("Łódź"), result('{"degrees": 12}')),
        *({"role": "assistant", "content": "12 °C."}, THANKS),
    ],
    "two calls at once": [QUESTION, sent_call("Łódź", "Łódź 2"), result("a"), result("b", 1)],
    "calls one after the other": [
        *(QUESTION, sent_call("Łódź"), result("a"), sent_call("Łódź 2"), result("b"))
    ],
    "a call with text": [QUESTION, sent_call("Łódź", content="I look."), result("a")],
    "a call with an empty text": [QUESTION, sent_call("Łódź", content=""), result("a")],
    "a call with thoughts": [
        *(QUESTION, sent_call("Łódź", reasoning_content="Where?"), result("a"))
    ],
    "thoughts": [QUESTION, REASONED, THANKS],
    "parts": [{"role": "user", "content": _PARTS}],
    "a late system message": [QUESTION, {"role": "assistant", "content": "x"}, SYSTEM, THANKS],
}
"""Conversations as OpenAI's clients send them, turn by turn."""

_ARGUMENTS = {
    "city": {"type": "string", "description": "Its name."},
    "days": {"type": "integer", "description": "How many."},
}
DESCRIBED_TOOLS = [tool("weather", _ARGUMENTS, "How is it in a city?", required=["city"])]
"""Without anything left out, as some released templates need them."""

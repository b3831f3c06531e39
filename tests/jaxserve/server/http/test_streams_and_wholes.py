"""A stream's events join to the whole answer, field by field, in every API and call format."""

import json
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.http import chat
from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.calls import CALL_FORMATS, CallFormat
from tests import golden
from tests.jaxserve.server.http.rig import HttpRig, events
from tests.jaxserve.text.conversations import tool
from tests.jaxserve.text.letters import ids_of

TOOLS = [tool("f", {"a": {"type": "string"}, "b": {}, "c": {"$ref": "#/$defs/C"}})]
STREAMED = yaml.safe_load(golden.text("text/streamed.yaml"))
VALUES, WORDS = STREAMED["values"], STREAMED["words"]
NAMES = ["f", "", "\\ud800", "unknown"]


def written(form: CallFormat, name: str, value: str) -> str:
    """A call as the family writes it, perhaps with malformed arguments."""
    before, after = form.around
    before = before.format(name=name, quoted=f'"{name}"', number=0)
    if form.parameter:
        opening, closing = form.parameter
        begun = (opening.format(key=key, string=str(key == "a").lower()) for key in "abc")
        value = "".join(f"{begin}{value}{closing}" for begin in begun)
    else:
        value = f'{{"a": {value}}}'
    return f"{form.begin}{before}{value}{after}{form.end}"


def answers(form: CallFormat) -> st.SearchStrategy[str]:
    call = st.builds(written, st.just(form), st.sampled_from(NAMES), st.sampled_from(VALUES))
    parts = st.lists(st.one_of(st.sampled_from(WORDS), call), min_size=1, max_size=3)
    marks = {"{begin}": form.begin, "{end}": form.end}

    def joined(texts: list[str]) -> str:
        text = "".join(texts)
        for mark, spelt in marks.items():
            text = text.replace(mark, spelt)
        return text

    return parts.map(joined)


def told(response: Any) -> list[Any]:
    """The events of a stream with named events."""
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat_stream(rig: HttpRig, fields: dict[str, Any]) -> tuple[Any, Any]:
    """(joined chunks, whole): reasoning, content, calls, reason of the end, usage."""
    reasoning = content = reason = ""
    calls: list[list[str]] = []
    *chunks, last = events(rig.chat(stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        reason = chunk["choices"][0]["finish_reason"] or reason
    answer = rig.chat(**fields).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    whole = [[function["name"], function["arguments"]] for function in functions]
    parts = message.get("reasoning_content") or "", message["content"] or ""
    whole_answer = *parts, whole, choice["finish_reason"], answer["usage"]
    return (reasoning, content, calls, reason, last["usage"]), whole_answer


def response_stream(rig: HttpRig, fields: dict[str, Any]) -> tuple[Any, Any]:
    """(joined deltas, whole): the items' types and texts."""
    items: list[list[str]] = []
    body = {"input": "hi", **fields, "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    for event in told(rig.client.post("/v1/responses", json={**body, "stream": True})):
        if event["type"] == "response.output_item.added":
            items.append([event["item"]["type"], event["item"].get("name", ""), ""])
        elif event["type"].endswith(".delta"):
            items[event["output_index"]][2] += event["delta"]
    whole = rig.client.post("/v1/responses", json=body).json()["output"]
    return items, [
        [
            item["type"],
            item.get("name", ""),
            item["arguments"] if "arguments" in item else item["content"][0]["text"],
        ]
        for item in whole
    ]


def message_stream(rig: HttpRig, fields: dict[str, Any]) -> tuple[Any, Any]:
    """(joined deltas, whole): the blocks' texts, calls as values, and the usage."""
    blocks: list[list[Any]] = []
    schema = TOOLS[0]["function"]["parameters"]
    body = {"model": "fake", "max_tokens": 1900, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"tools": [{"name": "f", "input_schema": schema}]}
    usage: Any = None
    for event in told(rig.client.post("/v1/messages", json={**body, "stream": True})):
        if event["type"] == "message_start":
            first = event["message"]["usage"]["input_tokens"]
        elif event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], event["content_block"].get("name"), ""])
        elif event["type"] == "content_block_delta":
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            blocks[event["index"]][2] += text
        elif event["type"] == "message_delta":
            usage = event["usage"]
    assert usage["input_tokens"] == first
    for block in blocks:
        if block[0] == "tool_use":
            try:
                block[2] = msgspec.json.decode(block[2] or "{}", type=dict)
            except msgspec.DecodeError:
                block[:] = ["text", None, f"{block[1]} {block[2]}"]
    whole = rig.client.post("/v1/messages", json=body).json()
    assert whole["usage"] == usage
    content = [[block["type"], block.get("name"), ""] for block in whole["content"]]
    for block, found in zip(content, whole["content"], strict=True):
        block[2] = found["input"] if block[0] == "tool_use" else found[block[0]]
    return blocks, content


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.begin + form.around[0][:12])
def test_a_stream_is_the_whole_in_pieces(wide: HttpRig, monkeypatch, form: CallFormat) -> None:
    wide.engine.cached_tokens = 2
    answer_format = AnswerMarkers(thinks=True, calls=form)
    monkeypatch.setattr(chat.AnswerMarkers, "of", lambda template: answer_format)

    @settings(max_examples=5)
    @given(answers(form), st.sampled_from([1, 3, 16, 1000]))
    def check(text: str, chunk: int) -> None:
        wide.engine.script, wide.engine.chunk = ids_of(text), chunk
        for stream in (chat_stream, response_stream, message_stream):
            fields = {"tools": TOOLS} if stream is chat_stream else {}
            joined, whole = stream(wide, fields)
            assert joined == whole, (stream.__name__, text)

    check()

"""The openai Python SDK against the server, as its users call it."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from jaxserve.errors import OverloadedError
from tests.jaxserve.server.http.rig import SECONDS, HttpRig
from tests.jaxserve.text.letters import ids_of

MESSAGES = [{"role": "user", "content": "hi"}]


def test_completions(sdk: openai.OpenAI) -> None:
    completion = sdk.completions.create(model="fake", prompt="hi", max_tokens=7, temperature=0)
    assert completion.choices[0].text == "one two"
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.total_tokens == 10
    assert [model.owned_by for model in sdk.models.list()] == ["jaxserve"]


class Answer(pydantic.BaseModel):
    a: int


def test_a_form(sdk: openai.OpenAI, rig: HttpRig) -> None:
    """The SDK asks for a strict schema, and parses the answer."""
    rig.engine.script = ids_of('{"a": 17}')
    chat = sdk.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Answer)
    assert chat.choices[0].message.parsed == Answer(a=17)


def test_errors(sdk: openai.OpenAI, rig: HttpRig) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: expected") as caught:
        sdk.completions.create(model="fake", prompt="hi", temperature=3)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        sdk.completions.create(model="other", prompt="hi")
    rig.engine.refusal = OverloadedError("8 requests wait already")
    with pytest.raises(openai.RateLimitError, match="8 requests wait already"):
        sdk.completions.create(model="fake", prompt="hi")
    rig.engine.refusal = None
    rig.engine.allowed = 3
    stream = sdk.completions.create(model="fake", prompt="hi", stream=True)
    next(iter(stream))
    rig.engine.fail("process 1 (ffn) is gone")
    with pytest.raises(openai.APIError, match="the engine failed; request "):
        list(stream)


def test_many_streams_of_an_asynchronous_client(rig: HttpRig) -> None:
    rig.engine.pace = 0.002

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{rig.url}/v1", api_key="none", timeout=SECONDS
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(64)))

    assert asyncio.run(many()) == ["one two three"] * 64


def test_tools_over_three_turns(rig: HttpRig) -> None:
    """The SDK sends the messages back as it received them, with all of their empty fields."""
    rig.engine.max_length = rig.generator._max_length = 5000
    written = 'Wait.<tool_call>\n{"name": "now", "arguments": {"z": %d}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", timeout=SECONDS) as client:
        for turn in range(2):
            rig.engine.script = ids_of((written % turn).removeprefix("Wait." if turn else ""))
            with client.chat.completions.stream(
                model="fake", messages=messages, tools=tools
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"z": turn}
            messages.append(message.model_dump(exclude={"parsed"}))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(turn)})
        rig.engine.script = ids_of("It is late.")
        last = client.chat.completions.create(model="fake", messages=messages, tools=tools)
    assert last.choices[0].message.content == "It is late."

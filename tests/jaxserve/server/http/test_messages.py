"""/v1/messages: by the anthropic SDK, by hand, and what is refused.

The SDK takes a second to import, which only a worker that runs these tests should pay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from jaxserve.errors import OverloadedError
from jaxserve.server.access import Access, ApiKeys
from tests import golden
from tests.jaxserve.server.http.rig import SECONDS, HttpRig, Make
from tests.jaxserve.text.letters import LETTERS, ids_of

if TYPE_CHECKING:
    import anthropic

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
TOOL: Any = {
    "name": "weather",
    "description": "How is it there?",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(roomy: HttpRig) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(
        base_url=roomy.url, api_key="none", timeout=SECONDS, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def sdk(client: anthropic.Anthropic, roomy: HttpRig) -> Iterator[anthropic.Anthropic]:
    """The client, before an engine that writes what it wrote at first."""
    roomy.engine.prompts.clear()
    roomy.engine.script, roomy.engine.cached_tokens = ids_of("one two three"), 0
    yield client
    roomy.engine.refusal = None


def create(sdk: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    given: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, **fields}
    return sdk.messages.create(**given)


def streamed(sdk: anthropic.Anthropic, **fields: Any) -> tuple[list[str], anthropic.types.Message]:
    """The types of the events as they were sent, and the message that the SDK made of them."""
    given: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI, **fields}
    with sdk.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def text_of(message: anthropic.types.Message) -> str:
    """The text of a message that has one block of text."""
    (block,) = message.content
    return block.text


def prompt_of(roomy: HttpRig) -> str:
    return LETTERS.decode(roomy.engine.prompts[-1])


class TestText:
    def test_a_message(self, sdk: anthropic.Anthropic, roomy: HttpRig) -> None:
        roomy.engine.cached_tokens = 2
        message = create(sdk, system="Be brief.", metadata={"user_id": "me"})
        (block,) = message.content
        assert block.type == "text"
        assert (block.text, message.role, message.model) == ("one two three", "assistant", "fake")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert prompt_of(roomy) == "[system]Be brief.[user]hi[assistant]"
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (34, 2)
        assert usage.output_tokens == 13

    def test_a_stream(self, sdk: anthropic.Anthropic, roomy: HttpRig) -> None:
        roomy.engine.cached_tokens = 2
        with sdk.messages.create(model="fake", max_tokens=7, messages=HI, stream=True) as stream:
            kinds = [event.type for event in stream]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        _, message = streamed(sdk, max_tokens=7)
        (block,) = message.content
        assert block.type == "text"
        assert (block.text, message.stop_reason) == ("one two", "max_tokens")
        usage = message.usage
        assert (usage.input_tokens, usage.output_tokens) == (17, 7)
        assert usage.cache_read_input_tokens == 2


class TestTools:
    def test_three_turns(self, sdk: anthropic.Anthropic, roomy: HttpRig) -> None:
        """The SDK sends back the content that it received, once streamed and once whole."""
        messages: list[Any] = list(HI)
        for turn in range(2):
            roomy.engine.script = ids_of(f"Wait.{CALL}" if turn else CALL)
            given: Any = {"messages": messages, "tools": [TOOL]}
            message = create(sdk, **given) if turn else streamed(sdk, **given)[1]
            assert message.stop_reason == "tool_use"
            call = message.content[-1]
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("weather", {"city": "x"})
            messages.append({"role": "assistant", "content": message.content})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{turn} °C"}
            messages.append({"role": "user", "content": [result]})
        messages[-1]["content"].append({"type": "text", "text": "So?"})
        roomy.engine.script = ids_of("Cold.")
        message = create(sdk, messages=messages, tools=[TOOL])
        assert text_of(message) == "Cold."
        assert "[assistant][tool]0 °C[assistant]Wait.[tool]1 °C[user]So?" in prompt_of(roomy)
        assert '"name": "weather"' in prompt_of(roomy)

    def test_runner(self, sdk: anthropic.Anthropic, roomy: HttpRig) -> None:
        """The SDK asks the server to keep the conversation; refused, it sends all of it."""
        import anthropic

        roomy.engine.script = ids_of(CALL)
        tool = anthropic.beta_tool(lambda city: f"0 °C in {city}", **TOOL)
        given: Any = {"model": "fake", "max_tokens": 99, "messages": HI, "tools": [tool]}
        runner = sdk.beta.messages.tool_runner(**given, max_iterations=3)
        assert [message.stop_reason for message in runner] == ["tool_use"] * 3
        assert "[assistant][tool]0 °C in x[assistant][tool]0 °C in x" in prompt_of(roomy)


class TestErrors:
    def test_name_the_field(self, roomy: HttpRig) -> None:
        """`golden/server/messages.txt` lists wrong fields."""

        def said(mistake: str) -> str:
            body = {"model": "fake", "max_tokens": 5, "messages": HI, **json.loads(mistake)}
            response = roomy.client.post("/v1/messages", json=body)
            answer = response.json()
            assert (response.status_code, answer["type"]) == (400, "error")
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["request_id"] == response.headers["x-request-id"]
            return answer["error"]["message"]

        golden.check_each("server/messages.txt", said)

    def test_of_the_sdk(self, sdk: anthropic.Anthropic, roomy: HttpRig) -> None:
        import anthropic

        with pytest.raises(anthropic.BadRequestError, match="max_tokens: is missing"):
            sdk.post("/v1/messages", body={"model": "fake", "messages": HI}, cast_to=httpx.Response)
        with pytest.raises(anthropic.NotFoundError, match="'other' is not served here"):
            create(sdk, model="other")
        roomy.engine.refusal = OverloadedError("8 requests wait already")
        with pytest.raises(anthropic.RateLimitError, match="8 requests wait already"):
            create(sdk)

    def test_in_a_stream(self, rig: HttpRig) -> None:
        import anthropic

        rig.engine.allowed = 3
        with anthropic.Anthropic(base_url=rig.url, api_key="none", max_retries=0) as sdk:
            stream = sdk.messages.create(model="fake", max_tokens=9, messages=HI, stream=True)
            next(iter(stream))
            rig.engine.fail("process 1 (ffn) is gone")
            with pytest.raises(anthropic.APIStatusError, match="the engine failed; request "):
                list(stream)


def test_keys_come_as_anthropics_clients_send_them(make_rig: Make) -> None:
    import anthropic

    rig = make_rig(access=Access(ApiKeys(["k" * 32])))
    for key in ({"api_key": "k" * 32}, {"auth_token": "k" * 32}):
        with anthropic.Anthropic(base_url=rig.url, max_retries=0, **key) as sdk:
            assert create(sdk, max_tokens=20).stop_reason == "end_turn"
    with anthropic.Anthropic(base_url=rig.url, api_key="other", max_retries=0) as sdk:
        with pytest.raises(anthropic.AuthenticationError, match="missing or wrong"):
            create(sdk)

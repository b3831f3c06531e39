"""/v1/responses: by the openai SDK, by hand, and what is refused."""

import openai
import pydantic
import pytest

from jaxserve.server.http import response_store
from jaxserve.server.http.response_store import ResponseStore
from tests.jaxserve.server.http.rig import HI, HttpRig, Make
from tests.jaxserve.text.conversations import tool
from tests.jaxserve.text.letters import LETTERS, ids_of

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
CITY = {"city": {"type": "string", "enum": ["x"]}}
FUNCTION = tool("weather", CITY, required=["city"], additionalProperties=False)["function"]
TOOL = {"type": "function", **FUNCTION}


class TestSdk:
    def test_a_text(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        wide.engine.cached_tokens = 2
        response = sdk.responses.create(
            model="fake", input="hi", instructions="Be brief.", store=False, metadata={"a": "b"}
        )
        assert response.output_text == "one two three"
        assert (response.status, response.error) == ("completed", None)
        (item,) = response.output
        assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
        assert LETTERS.decode(wide.engine.prompts[0]) == "[system]Be brief.[user]hi[assistant]"
        usage = response.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (36, 13, 49)
        assert usage.input_tokens_details.cached_tokens == 2
        assert response.metadata == {"a": "b"}

    def test_the_events_of_a_stream(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        wide.engine.script = ids_of(f"<think>\nHm.\n</think>\n\nSee.{CALL}")
        wide.engine.chunk = 1000
        with sdk.responses.create(model="fake", input="hi", tools=[TOOL], stream=True) as stream:
            found = list(stream)
        assert [event.sequence_number for event in found] == list(range(len(found)))
        part = "output_item.added content_part.added {0}.delta {0}.done content_part.done "
        part += "output_item.done "
        call = "function_call_arguments"
        assert [event.type.removeprefix("response.") for event in found] == (
            f"created in_progress {part.format('reasoning_text')}{part.format('output_text')}"
            f"output_item.added {call}.delta {call}.done output_item.done completed"
        ).split()
        done = [event.item for event in found if event.type == "response.output_item.done"]
        response = found[-1].response
        assert response.output == done
        assert [item.type for item in done] == ["reasoning", "message", "function_call"]
        assert done[0].content[0].text == "Hm."
        assert done[1].content[0].text == "See."
        assert (done[2].name, done[2].arguments) == ("weather", '{"city": "x"}')
        assert response.usage.output_tokens_details.reasoning_tokens == 3
        assert [event.output_index for event in found if hasattr(event, "output_index")] == sorted(
            [0] * 6 + [1] * 6 + [2] * 4
        )

    def test_a_call_and_its_answer(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        """Items of the first answer go back as they came."""
        wide.engine.script = ids_of(f"<think>\nHm.\n</think>\n\n{CALL}")
        conversation: list = [{"role": "user", "content": "hi"}]
        first = sdk.responses.create(model="fake", input=conversation, tools=[TOOL])
        call = first.output[-1]
        assert call.type == "function_call"
        conversation += first.output
        conversation.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        )
        wide.engine.script = ids_of("Fine.")
        second = sdk.responses.create(model="fake", input=conversation, tools=[TOOL])
        assert second.output_text == "Fine."
        assert LETTERS.decode(wide.engine.prompts[1]).startswith("[user]hi[assistant][tool]Sunny.")

    def test_a_form(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        class Answer(pydantic.BaseModel):
            a: int

        wide.engine.script = ids_of('Sure! {"a": 17} and more')
        response = sdk.responses.parse(model="fake", input="hi", text_format=Answer)
        assert response.output_parsed == Answer(a=17)


class TestLogprobs:
    @pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
    def test_of_the_message_alone(self, sdk: openai.OpenAI, wide: HttpRig, chunk: int) -> None:
        """Tokens of the reasoning, of calls, markers and dropped newlines belong to no message."""
        wide.engine.script = ids_of(f"why</think>\n\ny\u00e9s <b{CALL}")
        wide.engine.chunk = chunk
        extra = {"chat_template_kwargs": {"enable_thinking": True}}
        fields: dict = {"model": "fake", "input": "hi", "top_logprobs": 1, "tools": [TOOL]}
        whole = sdk.responses.create(**fields, extra_body=extra)
        with sdk.responses.create(**fields, stream=True, extra_body=extra) as stream:
            found = list(stream)
        deltas = [event for event in found if event.type == "response.output_text.delta"]
        told = [one for delta in deltas for one in delta.logprobs]
        assert bytes(byte for one in told for byte in one.bytes or []).decode() == "y\u00e9s <b"
        for delta in deltas:  # every character came with its own tokens
            assert len(delta.logprobs) == len(delta.delta.encode())
        for response in (whole, found[-1].response):
            assert [item.type for item in response.output] == [
                "reasoning",
                "message",
                "function_call",
            ]
            part = response.output[1].content[0]
            assert part.text == "y\u00e9s <b"
            assert [one.token for one in part.logprobs] == [one.token for one in told]


class TestStored:
    def test_a_conversation_goes_on(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        """The id alone suffices: it brings the items of all turns, without earlier instructions."""
        wide.engine.script = ids_of(f"<think>\nHm.\n</think>\n\n{CALL}")
        first = sdk.responses.create(model="fake", input="hi", instructions="Brief.", tools=[TOOL])
        assert (first.store, first.previous_response_id) == (True, None)
        answer = {"type": "function_call_output", "call_id": first.output[-1].call_id}
        wide.engine.script = ids_of("Fine.")
        with sdk.responses.stream(
            model="fake", input=[{**answer, "output": "Sun."}], previous_response_id=first.id
        ) as stream:
            second = stream.get_final_response()
        assert second.previous_response_id == first.id
        sdk.responses.create(model="fake", input="Why?", previous_response_id=second.id)
        prompt = LETTERS.decode(wide.engine.prompts[2])
        assert prompt == "[user]hi[assistant][tool]Sun.[assistant]Fine.[user]Why?[assistant]"

    def test_read_and_forgotten(self, sdk: openai.OpenAI, wide: HttpRig) -> None:
        response = sdk.responses.create(model="fake", input="hi")
        found = sdk.responses.retrieve(response.id)
        assert found.model_dump() == response.model_dump()
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            sdk.responses.cancel(response.id)
        sdk.responses.delete(response.id)
        unkept = sdk.responses.create(model="fake", input="hi", store=False)
        for one in (response, unkept):
            with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
                sdk.responses.retrieve(one.id)
        with pytest.raises(openai.NotFoundError, match="3600 s") as caught:
            sdk.responses.create(model="fake", input="hi", previous_response_id=unkept.id)
        assert caught.value.param == "previous_response_id"

    def test_wrong_items_are_counted_without_earlier_ones(self, wide: HttpRig) -> None:
        first = wide.client.post("/v1/responses", json={"input": "hi"}).json()
        body = {"input": [HI, {"type": "x"}], "previous_response_id": first["id"]}
        assert wide.refused("/v1/responses", **body)["param"] == "input[1].type"

    def test_processes_that_share_a_port_keep_none(self, make_rig: Make) -> None:
        rig = make_rig(max_length=2000, share_port=True)
        first = rig.client.post("/v1/responses", json={"input": "hi", "store": True}).json()
        assert first["store"] is False
        answer = rig.client.get(f"/v1/responses/{first['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert "server.processes" in answer.text

    def test_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Limits of time, of bytes (the oldest go first), and between tenants."""
        monkeypatch.setattr(response_store, "MAX_BYTES", 10)
        now = 0.0
        store = ResponseStore(lambda: now)
        for name in "abc":
            store.put("me", name, b"1234", b"")
        assert [store.get("me", name) is None for name in "abc"] == [True, False, False]
        assert store.get("you", "b") is None
        store.put("me", "d", b"12345678901", b"")  # larger than all may be together
        assert [store.get("me", name) is None for name in "bcd"] == [False, False, True]
        now = 3600.0
        assert store.get("me", "c") is None


def test_truncation_where_roles_alternate(make_rig: Make) -> None:
    """A conversation that begins with an answer is refused by the template; two of 17 must go."""
    template = (
        "{% for message in messages %}"
        "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}{{ message.content }}{% endfor %}"
    )
    rig = make_rig(template=template, max_length=17 * 20)
    roles = ["user", "assistant"] * 8 + ["user"]
    items = [{"role": role, "content": chr(97 + n) * 20} for n, role in enumerate(roles)]
    answer = rig.client.post("/v1/responses", json={"input": items, "truncation": "auto"})
    prompt = LETTERS.decode(rig.engine.prompts[-1])
    assert answer.status_code == 200
    assert prompt == "".join(item["content"] for item in items[2:])

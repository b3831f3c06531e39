"""POST /v1/chat/completions, as bodies and events on the wire."""

from tests import golden
from tests.jaxserve.server.http.rig import HttpRig, Make, events
from tests.jaxserve.text.letters import ids_of


def deltas(chunks: list[dict], key: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(key, "") for chunk in chunks)


def test_an_answer(rig: HttpRig) -> None:
    body = rig.chat(request_id="a").json()
    assert body.pop("created") > 1_700_000_000
    golden.check("server/chat.json", body)
    assert rig.engine.prompts == [ids_of("[user]hi[assistant]")]


def test_a_stream(rig: HttpRig) -> None:
    chunks = events(rig.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *chunks, usage = chunks
    assert deltas(chunks, "content") == "one two three"
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 13


def test_token_ids(rig: HttpRig) -> None:
    chunks = events(rig.chat(return_token_ids=True, max_tokens=3, stream=True))
    found = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert found == ids_of("one")
    assert chunks[0]["prompt_token_ids"] == ids_of("[user]hi[assistant]")


class TestLogprobs:
    def test_of_a_stream(self, rig: HttpRig) -> None:
        chunks = events(rig.chat(logprobs=True, stream=True))
        found = [
            entry["token"]
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(found) == "one two three"
        rig.engine.script = []  # only the end, which has no token
        chunks = events(rig.chat(logprobs=True, stream=True))
        assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, None]


class TestReasoning:
    def test_left_out(self, rig: HttpRig) -> None:
        rig.engine.script = ids_of("<think>\nHm.\n</think>\n\nYes.")
        chunks = events(rig.chat(include_reasoning=False, stream=True))
        assert deltas(chunks, "reasoning_content") == ""
        assert deltas(chunks, "content") == "Yes."


def test_a_model_without_a_template(make_rig: Make) -> None:
    rig = make_rig(template=None)
    assert "no chat template" in rig.refused("/v1/chat/completions")["message"]

"""POST /v1/completions, as bodies and events on the wire."""

import httpx
import pytest

from jaxserve.engine.request import SamplingParams, TokenOutput
from tests import golden
from tests.jaxserve.server.http.rig import events
from tests.jaxserve.text.letters import ids_of
from tests.jaxserve.waiting import until


def test_a_completion(rig):
    response = rig.complete(request_id="a")
    body = response.json()
    assert body.pop("created") > 1_700_000_000
    golden.check("server/completion.json", body)
    assert rig.engine.params == [SamplingParams(max_tokens=16)]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "a"


def test_a_stop_string_of_a_stream(rig):
    choices = [event["choices"][0] for event in events(rig.complete(stop=["wo th"], stream=True))]
    assert "".join(choice["text"] for choice in choices) == "one t"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "wo th")


def test_special_tokens_are_spelt_out_if_asked_for(rig):
    rig.engine.script = [*ids_of("a"), 0, *ids_of("b")]  # 0 is <s>
    fields = {"prompt": [0, *ids_of("x")], "echo": True, "stop": ["<s>b"]}
    assert rig.complete(**fields).json()["choices"][0]["text"] == "xab"
    choice = rig.complete(**fields, skip_special_tokens=False).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("<s>xa", "<s>b")


def test_a_stream(rig):
    chunks = events(rig.complete(stream=True))
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_of_a_stream(rig):
    *chunks, last = events(rig.complete(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 13)


def test_usage_as_it_grows(rig):
    rig.engine.pace = 0.04
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(rig.complete(stream=True, max_tokens=4, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    options = {"continuous_usage_stats": True}  # of a usage that is not asked for
    chunks = events(rig.complete(stream=True, max_tokens=4, stream_options=options))
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_of_several_choices(rig):
    chunks = events(rig.complete(stream=True, n=3, echo=True))
    texts = ["", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["hione two three"] * 3
    texts = ["", "", ""]
    for chunk in events(rig.chat(stream=True, n=3)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["one two three"] * 3


def test_a_stream_of_an_empty_completion(rig):
    rig.engine.script = []
    (chunk,) = events(rig.complete(stream=True))
    assert chunk["choices"][0]["finish_reason"] == "stop"


class TestLogprobs:
    """The fake engine's are minus a hundredth of the id; o, n, e are 80, 79, 70."""

    @pytest.mark.parametrize("chunk", [1, 2, 13])
    def test_of_a_stream(self, rig, chunk):
        rig.engine.chunk = chunk
        whole = rig.complete(logprobs=2, echo=True).json()["choices"][0]["logprobs"]
        chunks = [c["choices"][0] for c in events(rig.complete(logprobs=2, echo=True, stream=True))]
        for key in whole:
            assert [x for chunk in chunks for x in chunk["logprobs"][key]] == whole[key]


def test_cached_tokens(rig):
    rig.engine.cached_tokens = 2
    usage = rig.complete(prompt=["abc", "def"], n=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_failed_engine_is_the_last_event_of_a_stream(rig, caplog):
    """Clients get the request id; which host and process failed is in the log alone."""
    caplog.set_level("INFO", "jaxserve.http")
    with rig.streaming(request_id="a1") as lines:
        rig.engine.fail("process 1 (ffn, host node-17, pid 4321) is gone")
        rest = [line for line in lines if line]
    assert '"message":"the engine failed; request a1"' in rest[-1]
    assert "[DONE]" not in "".join(rest)
    refused = rig.complete(request_id="a2")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json()["error"]["message"] == "the engine failed; request a2"
    until(lambda: "error=process 1 (ffn, host node-17, pid 4321) is gone" in caplog.text)


def test_a_client_whose_workers_are_all_gone_reads_what_it_has_lost(rig, caplog):
    caplog.set_level("INFO", "jaxserve.http")
    why = "domain worker 10.0.0.7:9100 is gone; it has lost 4 workers (fleet.attempts = 3)"
    with rig.streaming(request_id="a1") as lines:
        ((name, running),) = rig.engine._running.items()
        until(lambda: running.sent == 3)
        running.on_output(
            TokenOutput(request_id=name, finish_reason="error", error=why, unavailable=True)
        )
        rest = [line for line in lines if line]
    shown = why.replace("10.0.0.7:9100", "…")
    message = f"no worker is left ({shown}); 3 tokens of its answer are lost; request a1"
    assert f'"message":"{message}"' in rest[-1]
    # The server writes the line once the client has the last byte.
    until(lambda: f"error={why}" in caplog.text)


def test_choices_that_cannot_all_be_had_are_all_given_up(rig):
    rig.engine.allowed = 1
    submit, seen = rig.engine.submit, []

    def limited(*arguments, **options):  # type: ignore[no-untyped-def]
        seen.append(options["request_id"])
        if len(seen) == 3:
            raise KeyError("a secret path")
        return submit(*arguments, **options)

    rig.engine.submit = limited  # type: ignore[method-assign]
    response: httpx.Response = rig.complete(n=4)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert rig.engine.wait_until_idle()
    assert len(set(seen)) == 3

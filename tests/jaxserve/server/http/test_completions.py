"""POST /v1/completions, as bodies and events on the wire."""

import httpx
import pytest

from jaxserve.engine.request import SamplingParams, TokenOutput
from tests import golden
from tests.jaxserve.server.http.rig import HttpRig, events
from tests.jaxserve.text.letters import ids_of
from tests.jaxserve.waiting import until


def test_a_completion(rig: HttpRig) -> None:
    response = rig.complete(request_id="a")
    body = response.json()
    assert body.pop("created") > 1_700_000_000
    golden.check("server/completion.json", body)
    assert rig.engine.params == [SamplingParams(max_tokens=16)]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "a"


def test_sampling_fields_reach_the_engine(rig: HttpRig) -> None:
    same = {"max_tokens": 7, "temperature": 0, "top_p": 0.5, "min_p": 0.25, "seed": 0}
    same |= {"ignore_eos": True, "min_tokens": 2, "repetition_penalty": 1.25, "priority": -3}
    same |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False, "model": "fake"}
    ignored |= {"suffix": None, "logprobs": None}
    asked = {"top_k": -1, "stop": ["x", "y"], "stop_token_ids": [9], "logit_bias": {"5": -100}}
    rig.complete(**same, **asked, **ignored, best_of=1)
    there = {"top_k": 0, "stop": ("x", "y"), "stop_token_ids": (9,), "logit_bias": {5: -100.0}}
    assert rig.engine.params == [SamplingParams(**same, **there)]


@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_a_stop_string(rig: HttpRig, chunk: int) -> None:
    rig.engine.chunk, rig.engine.pace = chunk, 0.02  # each chunk is an event of its own
    choice = rig.complete(stop="two").json()["choices"][0]
    found = choice["text"], choice["finish_reason"], choice["stop_reason"]
    assert found == ("one ", "stop", "two")
    choices = [event["choices"][0] for event in events(rig.complete(stop=["wo th"], stream=True))]
    assert "".join(choice["text"] for choice in choices) == "one t"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "wo th")


def test_several_prompts_and_choices(rig: HttpRig) -> None:
    body = rig.complete(prompt=["a", "bc"], n=2, seed=7, echo=True).json()
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(n, ["a", "bc"][n // 2] + "one two three") for n in range(4)]
    assert [params.seed for params in rig.engine.params] == [7, 8, 7, 8]
    # a prompt counts once, with bos; every choice counts
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2 + 3, 4 * 13)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
def test_token_ids(rig: HttpRig, prompt: list) -> None:
    choice = rig.complete(prompt=prompt, return_token_ids=True, max_tokens=2).json()["choices"][0]
    assert rig.engine.prompts == [[5, 6]]
    assert choice["prompt_token_ids"] == [5, 6]
    assert choice["token_ids"] == ids_of("on")
    assert choice["finish_reason"] == "length"


def test_special_tokens_are_spelt_out_if_asked_for(rig: HttpRig) -> None:
    rig.engine.script = [*ids_of("a"), 0, *ids_of("b")]  # 0 is <s>
    fields = {"prompt": [0, *ids_of("x")], "echo": True, "stop": ["<s>b"]}
    assert rig.complete(**fields).json()["choices"][0]["text"] == "xab"
    choice = rig.complete(**fields, skip_special_tokens=False).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("<s>xa", "<s>b")


def test_a_stream(rig: HttpRig) -> None:
    chunks = events(rig.complete(stream=True))
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_of_a_stream(rig: HttpRig) -> None:
    *chunks, last = events(rig.complete(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 13)


def test_usage_as_it_grows(rig: HttpRig) -> None:
    rig.engine.pace = 0.04
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(rig.complete(stream=True, max_tokens=4, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    options = {"continuous_usage_stats": True}  # of a usage that is not asked for
    chunks = events(rig.complete(stream=True, max_tokens=4, stream_options=options))
    assert not any("usage" in chunk for chunk in chunks)


def test_options_of_a_stream_without_a_stream(rig: HttpRig) -> None:
    for name in ("include_usage", "continuous_usage_stats"):
        error = rig.refused(stream_options={name: True})
        assert error["param"] == f"stream_options.{name}"
    assert rig.complete(stream_options={"include_usage": False}).status_code == 200


def test_which_side_of_the_prompt_is_kept(rig: HttpRig) -> None:
    for side, kept in ((None, "cd"), ("left", "cd"), ("right", "ab")):
        prompt = ids_of("abcd")
        rig.complete(prompt=prompt, truncate_prompt_tokens=2, truncation_side=side)
        assert rig.engine.prompts[-1] == ids_of(kept)
    assert rig.refused(truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"
    rig.chat(truncate_prompt_tokens=4)
    assert rig.engine.prompts[-1] == ids_of("ant]")


def test_a_stream_of_several_choices(rig: HttpRig) -> None:
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


def test_a_stream_of_an_empty_completion(rig: HttpRig) -> None:
    rig.engine.script = []
    (chunk,) = events(rig.complete(stream=True))
    assert chunk["choices"][0]["finish_reason"] == "stop"


class TestLogprobs:
    """The fake engine's are minus a hundredth of the id; o, n, e are 80, 79, 70."""

    def test_of_a_completion(self, rig: HttpRig) -> None:
        choice = rig.complete(logprobs=2, max_tokens=3).json()["choices"][0]
        rivals = [{"o": -0.80, "n": -0.79}, {"n": -0.79, "m": -0.78}, {"e": -0.70, "d": -0.69}]
        assert choice["logprobs"] == {
            "tokens": ["o", "n", "e"],
            "token_logprobs": [-0.80, -0.79, -0.70],
            "top_logprobs": rivals,
            "text_offset": [0, 1, 2],
        }

    def test_of_an_echo_as_lm_eval_asks_for_it(self, rig: HttpRig) -> None:
        """Token ids in, log-likelihoods of all but the first out, then the one generated token."""
        prompt = ids_of("abc")
        choice = rig.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
        logprobs = choice.json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c", "o"]
        assert logprobs["token_logprobs"] == [None, *(-i / 100 for i in [*prompt[1:], 80])]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert logprobs["top_logprobs"][0] is None
        assert rig.engine.params[0].prompt_logprobs == 1

    def test_offsets_count_whole_characters(self, rig: HttpRig) -> None:
        """The tokens of a character have its offset; names such as "bytes:..." do not count."""
        rig.engine.script = ids_of("\u00e9x")
        choice = rig.complete(prompt="\u00fc", echo=True, logprobs=0).json()["choices"][0]
        assert choice["text"] == "\u00fc\u00e9x"
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2]  # bos first

    @pytest.mark.parametrize("chunk", [1, 2, 13])
    def test_of_a_stream(self, rig: HttpRig, chunk: int) -> None:
        rig.engine.chunk = chunk
        whole = rig.complete(logprobs=2, echo=True).json()["choices"][0]["logprobs"]
        chunks = [c["choices"][0] for c in events(rig.complete(logprobs=2, echo=True, stream=True))]
        for key in whole:
            assert [x for chunk in chunks for x in chunk["logprobs"][key]] == whole[key]

    def test_a_stop_string_cuts_them_with_the_tokens(self, rig: HttpRig) -> None:
        rig.engine.chunk = 13
        choice = rig.complete(logprobs=0, stop=[" t"], return_token_ids=True).json()["choices"][0]
        assert choice["text"] == "one"
        assert choice["token_ids"] == ids_of("one t")
        assert choice["logprobs"]["tokens"] == list("one t")
        assert choice["logprobs"]["top_logprobs"][:2] == [{"o": -0.80}, {"n": -0.79}]

    def test_of_part_of_a_character(self, rig: HttpRig) -> None:
        rig.engine.script = ids_of("é")
        choice = rig.complete(logprobs=0).json()["choices"][0]
        assert choice["text"] == "é"
        assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]

    def test_of_the_prompt(self, rig: HttpRig) -> None:
        choice = rig.complete(prompt=ids_of("ab"), prompt_logprobs=1, max_tokens=1).json()
        b = ids_of("b")[0]
        entry = {"logprob": -b / 100, "rank": 1, "decoded_token": "b"}
        assert choice["choices"][0]["prompt_logprobs"] == [None, {str(b): entry}]


def test_cached_tokens(rig: HttpRig) -> None:
    rig.engine.cached_tokens = 2
    usage = rig.complete(prompt=["abc", "def"], n=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_prefixes_are_shared_inside_a_salt(rig: HttpRig) -> None:
    rig.complete()
    rig.complete(cache_salt="x")
    assert [params.cache_salt for params in rig.engine.params] == ["", "/x"]


def test_another_model(rig: HttpRig) -> None:
    response = rig.complete(model="gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "model: 'gpt-4' is not served here; 'fake' is"


def test_a_failed_engine_is_the_last_event_of_a_stream(
    rig: HttpRig, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_client_whose_workers_are_all_gone_reads_what_it_has_lost(
    rig: HttpRig, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_choices_that_cannot_all_be_had_are_all_given_up(rig: HttpRig) -> None:
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

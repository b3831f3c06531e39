"""Fields that OpenAI's and vLLM's clients send, beyond the everyday ones."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.jaxserve.server.http.rig import TEMPLATE, HttpRig
from tests.jaxserve.text.conversations import TOOLS
from tests.jaxserve.text.letters import LETTERS, ids_of

NULLS = (
    *("max_tokens", "max_completion_tokens", "seed", "stop", "tools", "tool_choice", "audio"),
    *("functions", "function_call", "prediction", "web_search_options", "modalities", "verbosity"),
    *("store", "metadata", "service_tier", "logit_bias", "stream_options", "chat_template"),
    *("kv_transfer_params", "guided_json", "structured_outputs", "documents", "vllm_xargs"),
)
DEFAULTS = {
    "modalities": ["text"],
    "length_penalty": 1.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "logits_processors": [],
    "stream_options": {"include_usage": None},
    "thinking_token_budget": -1,
}


@pytest.fixture(scope="module")
def rig() -> Any:
    """With room for tools; a test sets the script that it wants."""
    rig = HttpRig(max_length=2000)
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def _script(rig: HttpRig) -> None:
    rig.engine.script = ids_of("one two three")


def text(rig: HttpRig, **fields: Any) -> str:
    response = rig.chat(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_fields_without_a_value_and_defaults(rig: HttpRig) -> None:
    assert text(rig, **dict.fromkeys(NULLS)) == "one two three"
    assert text(rig, **DEFAULTS) == "one two three"


@pytest.mark.parametrize(
    ("field", "value"),
    [("modalities", ["audio"]), ("length_penalty", 2), ("use_beam_search", True), ("audio", {})],
)
def test_what_would_change_the_answer_is_refused(rig: HttpRig, field: str, value: Any) -> None:
    error = rig.refused("/v1/chat/completions", **{field: value})
    assert error["param"].startswith(field)


@pytest.mark.parametrize(
    ("seed", "folded"), [(5, 5), (2**32 - 1, 2**32 - 1), (2**32, 1), (-1, 0), (-7, 6)]
)
def test_seeds_of_64_bits(rig: HttpRig, seed: int, folded: int) -> None:
    text(rig, seed=seed)
    assert rig.engine.params[-1].seed == folded


def test_the_stop_string_in_the_output(rig: HttpRig) -> None:
    assert text(rig, stop="two") == "one "
    assert text(rig, stop="two", include_stop_str_in_output=True) == "one two"
    rig.engine.script = ids_of("one tw")
    assert text(rig, stop="w", include_stop_str_in_output=True) == "one tw"


def test_tokens_and_words_that_may_come(rig: HttpRig) -> None:
    assert text(rig, allowed_token_ids=ids_of("otw"), max_tokens=4) == "otwo"
    assert text(rig, bad_words=["two"]) == "one tw three"
    assert text(rig, bad_words=["e"]) == "on two thr"


def test_a_budget_of_thoughts(rig: HttpRig) -> None:
    rig.engine.script = ids_of("Hm, hm, hm, hm.\n</think>\n\nYes.")
    body = rig.chat(
        thinking_token_budget=5, chat_template_kwargs={"enable_thinking": True}, max_tokens=15
    ).json()
    assert body["choices"][0]["message"]["reasoning"] == "Hm, h"
    rig.engine.script = ids_of("<think>Hm, hm.\n</think>\n\nYes.")
    body = rig.chat(thinking_token_budget=2, max_tokens=17).json()
    assert body["choices"][0]["message"]["reasoning"] == "Hm"


def test_bos_or_not(rig: HttpRig) -> None:
    rig.complete(prompt="ab", add_special_tokens=False)
    assert rig.engine.prompts[-1] == ids_of("ab")
    text(rig, add_special_tokens=True)
    assert rig.engine.prompts[-1] == [0, *ids_of("[user]hi[assistant]")]


def test_tokens_by_their_ids(rig: HttpRig) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    choice = rig.chat(return_tokens_as_token_ids=True, **fields).json()["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    name = f"token_id:{ids_of('o')[0]}"
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == (name, name)
    choice = rig.complete(return_tokens_as_token_ids=True, logprobs=1, max_tokens=1).json()
    assert choice["choices"][0]["logprobs"]["tokens"] == [name]


def test_nothing_but_the_prompt(rig: HttpRig) -> None:
    body = rig.complete(prompt="ab", max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"][-2:] == ["a", "b"]
    assert body["usage"]["completion_tokens"] == 0
    assert rig.refused(max_tokens=0)["param"] == "max_tokens"


def test_a_message_that_is_continued(rig: HttpRig) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    body = rig.client.post("/v1/chat/completions", json=fields).json()
    assert LETTERS.decode(rig.engine.prompts[-1]) == "[user]hi[assistant]It is "
    assert body["choices"][0]["message"]["content"] == "It is one two three"
    messages[-1]["content"] = [{"type": "text", "text": "a"}]  # as in the template's marks
    body = rig.client.post("/v1/chat/completions", json=fields).json()
    assert LETTERS.decode(rig.engine.prompts[-1]) == "[user]hi[assistant]a"
    assert body["choices"][0]["message"]["content"] == "aone two three"
    both = {**fields, "add_generation_prompt": True}
    assert rig.refused("/v1/chat/completions", **both)["param"] == "add_generation_prompt"


def test_some_of_the_tools(rig: HttpRig) -> None:
    named = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    text(rig, tools=TOOLS, tool_choice=choice)
    prompt = LETTERS.decode(rig.engine.prompts[-1])
    assert '"now"' in prompt
    assert '"weather"' not in prompt


def test_older_names_of_structured_outputs(rig: HttpRig) -> None:
    rig.engine.script = ids_of("so green")
    assert text(rig, guided_choice=["red", "green"]) == "green"


def test_structural_tags(rig: HttpRig) -> None:
    rig.engine.script = ids_of("Well, <f>no5</f> and more")
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    assert text(rig, response_format=tag) == "Well, <f>5</f> and more"
    tag["triggers"] = ["<g"]
    error = rig.refused("/v1/chat/completions", response_format=tag)
    assert "begin" in error["message"]


def test_no_thoughts_to_limit() -> None:
    rig = HttpRig(template=TEMPLATE.replace("<think>", ""))
    error = rig.refused("/v1/chat/completions", thinking_token_budget=3)
    assert error["param"] == "thinking_token_budget"
    rig.close()


def test_the_models_names() -> None:
    rig = HttpRig(model_names=["small", "demo/small"])
    ids = [model["id"] for model in rig.client.get("/v1/models").json()["data"]]
    assert ids == ["small", "demo/small"]
    assert rig.client.get("/v1/models/small").json()["root"] == "fake"
    assert rig.chat(model="demo/small").json()["model"] == "demo/small"
    assert rig.chat().json()["model"] == "small"
    assert rig.chat(model="fake").status_code == 404
    rig.close()


def test_what_clients_ask_about_the_server(rig: HttpRig) -> None:
    assert rig.client.get("/ping").json() == {"status": "ready"}
    assert rig.client.get("/load").json() == {"server_load": 0}
    info = rig.client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_tokens"]) == ("<s>", ["</s>"])
    assert info["chat_template"] == TEMPLATE


def test_ignored_fields_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = HttpRig()
    with caplog.at_level("WARNING", "jaxserve.server.http.service"):
        for _ in range(2):
            assert text(rig, user="me", verbosity="low", metadata={"a": "b"}, store=False)
    rig.close()
    told = sorted(record.getMessage().split()[2] for record in caplog.records)
    assert told == ["metadata,", "user,", "verbosity,"]


OWN = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def test_a_template_of_the_request_is_refused(rig: HttpRig) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = rig.refused(path, messages=messages, chat_template=OWN)
        assert error["param"] == "chat_template"
        assert "server.request_templates" in error["message"]


def test_the_models_template_does_not_wait_for_those_of_requests() -> None:
    endless = "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    rig = HttpRig(request_templates=True)
    rig.client.timeout = 60  # two seconds of processor time take longer on a busy machine
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(rig.refused, "/v1/chat/completions", chat_template=endless)
        answered = 0
        while not hostile.done():
            answered += rig.chat().status_code == 200
    assert hostile.result()["param"] == "chat_template"
    assert "it took more than 2 s" in hostile.result()["message"]
    assert answered >= 10  # a rendering takes two seconds, and the template is rendered once
    rig.close()


def test_a_template_of_the_request() -> None:
    rig = HttpRig(request_templates=True)
    assert text(rig, chat_template=OWN) == "one two three"
    assert rig.engine.prompts == [ids_of("<hi>")]
    asked = {"messages": [{"role": "user", "content": "hi"}], "chat_template": OWN}
    assert rig.client.post("/tokenize", json=asked).json()["tokens"] == ids_of("<hi>")
    for wrong in ("{% for %}", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}"):
        error = rig.refused("/v1/chat/completions", chat_template=wrong)
        assert error["param"] in ("chat_template", "messages")
    assert text(rig) == "one two three"
    rig.close()

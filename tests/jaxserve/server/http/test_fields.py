"""Fields that OpenAI's and vLLM's clients send, beyond the everyday ones."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from jaxserve.server.http.foreign_fields import understood
from jaxserve.server.http.message_input import MessagesRequest
from jaxserve.server.http.requests import ChatRequest
from tests import golden
from tests.jaxserve.server.http.rig import RIGHT, TEMPLATE, HttpRig
from tests.jaxserve.text.letters import ids_of


@pytest.fixture
def rig(roomy: HttpRig) -> HttpRig:
    """A test sets the script that it wants."""
    roomy.engine.script = ids_of("one two three")
    return roomy


def text(rig: HttpRig, **fields: Any) -> str:
    response = rig.chat(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_no_thoughts_to_limit(make_rig):
    rig = make_rig(template=TEMPLATE.replace("<think>", ""))
    error = rig.refused("/v1/chat/completions", thinking_token_budget=3)
    assert error["param"] == "thinking_token_budget"


def test_the_models_names(make_rig):
    rig = make_rig(model_names=["small", "demo/small"])
    ids = [model["id"] for model in rig.client.get("/v1/models").json()["data"]]
    assert ids == ["small", "demo/small"]
    assert rig.client.get("/v1/models/small").json()["root"] == "fake"
    assert rig.chat(model="demo/small").json()["model"] == "demo/small"
    assert rig.chat().json()["model"] == "small"
    assert rig.chat(model="fake").status_code == 404


def test_what_clients_ask_about_the_server(rig):
    assert rig.client.get("/ping").json() == {"status": "ready"}
    assert rig.client.get("/load").json() == {"server_load": 0}
    info = rig.client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_tokens"]) == ("<s>", ["</s>"])
    assert info["chat_template"] == TEMPLATE


def test_ignored_fields_are_told_once(make_rig, caplog):
    rig = make_rig()
    with caplog.at_level("WARNING", "jaxserve.server.http.service"):
        for _ in range(2):
            assert text(rig, user="me", verbosity="low", metadata={"a": "b"}, store=False)
    told = sorted(record.getMessage().split()[2] for record in caplog.records)
    assert told == ["metadata,", "user,", "verbosity,"]


OWN = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


def test_a_template_of_the_request_is_refused(rig):
    messages = [{"role": "user", "content": "hi"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = rig.refused(path, messages=messages, chat_template=OWN)
        assert error["param"] == "chat_template"
        assert "server.request_templates" in error["message"]


def test_the_models_template_does_not_wait_for_those_of_requests(make_rig):
    endless = "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    rig = make_rig(request_templates=True)
    rig.client.timeout = 60  # two seconds of processor time take longer on a busy machine
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(rig.refused, "/v1/chat/completions", chat_template=endless)
        answered = 0
        while not hostile.done():
            answered += rig.chat().status_code == 200
    assert hostile.result()["param"] == "chat_template"
    assert "it took more than 2 s" in hostile.result()["message"]
    assert answered >= 10  # a rendering takes two seconds, and the template is rendered once


def test_a_template_of_the_request(make_rig):
    rig = make_rig(request_templates=True)
    assert text(rig, chat_template=OWN) == "one two three"
    assert rig.engine.prompts == [ids_of("<hi>")]
    asked = {"messages": [{"role": "user", "content": "hi"}], "chat_template": OWN}
    assert rig.client.post("/tokenize", json=asked).json()["tokens"] == ids_of("<hi>")
    for wrong in ("{% for %}", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}"):
        error = rig.refused("/v1/chat/completions", chat_template=wrong)
        assert error["param"] in ("chat_template", "messages")
    assert text(rig) == "one two three"


LEFT_OUT = (
    *("keep_alive", "num_ctx", "chat_id", "session_id", "provider", "cache_prompt", "id_slot"),
    *("user_id", "trace", "usage", "stream_reasoning", "separate_reasoning", "custom"),
)


def test_unknown_fields_are_left_out_and_told_once(make_rig, caplog):
    rig = make_rig(unknown_fields="warn")
    given: dict[str, Any] = dict.fromkeys(LEFT_OUT, True)
    given |= {"stream_options": {"include_usage": None, "x": 1}, "best_of": None, "tfs_z": 1}
    with caplog.at_level("WARNING", "jaxserve.server.http.service"):
        for _ in range(2):
            assert text(rig, **given) == "one two three"
        told = sorted(record.getMessage().split("'")[1] for record in caplog.records)
        assert told == sorted([*LEFT_OUT, "stream_options.x"])
        for name, value in {"mirostat": 2, "images": ["x"], "separate_reasoning": False}.items():
            assert rig.refused("/v1/chat/completions", **{name: value})["param"] == name


def test_null_is_a_missing_field(make_rig):
    rig = make_rig(unknown_fields="warn")
    nothing = {"system": None, "tools": None, "nobody": None, "stop_sequences": None}
    answer = rig.client.post("/v1/messages", json=RIGHT["/v1/messages"] | nothing)
    assert answer.status_code == 200, answer.text
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = msgspec.json.encode(RIGHT["/v1/messages"] | nothing | {"thinking": thinking})
    request = understood(body, MessagesRequest, print)
    assert request.thinking is not None
    assert request.thinking.budget_tokens == 1024
    tokens = rig.client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": None})
    assert tokens.status_code == 200, tokens.text
    item = {"type": None, "role": "user", "content": "hi", "x": 1}
    assert rig.client.post("/v1/responses", json={"input": [item]}).status_code == 200
    blocks: list[Any] = [{"type": "text", "text": "a", "x": 1}] * 100  # one name, left out once
    messages = {"messages": [{"role": "user", "content": blocks}]}
    told: list[str] = []
    understood(msgspec.json.encode(RIGHT["/v1/messages"] | messages), MessagesRequest, told.append)
    assert told == ["messages.0.content.0.x"]


@golden.table("server/spellings.yaml")
def test_other_servers_spellings(theirs, ours):
    base = {"messages": [{"role": "user", "content": "hi"}]}
    body = msgspec.json.encode(base | theirs | {"stop": "x"})
    assert understood(body, ChatRequest, pytest.fail) == msgspec.convert(
        base | ours | {"stop": "x"}, ChatRequest
    )

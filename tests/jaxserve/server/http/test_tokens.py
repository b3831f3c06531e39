"""POST /tokenize and /detokenize."""

import pytest

from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.text.letters import ids_of


def test_a_prompt_has_bos_in_front(rig: HttpRig) -> None:
    body = rig.client.post("/tokenize", json={"prompt": "ab"}).json()
    assert body == {
        "count": 3,
        "max_model_len": 100,
        "tokens": [0, *ids_of("ab")],
        "token_strs": None,
    }


def test_a_prompt_without_bos(rig: HttpRig) -> None:
    fields = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    body = rig.client.post("/tokenize", json=fields).json()
    assert (body["tokens"], body["token_strs"]) == (ids_of("ab"), ["a", "b"])


def test_a_conversation(rig: HttpRig) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = rig.client.post("/tokenize", json={"messages": messages}).json()
    assert body["tokens"] == ids_of("[user]hi[assistant]")


def test_there_and_back(rig: HttpRig) -> None:
    tokens = rig.client.post("/tokenize", json={"prompt": "Łódź 🙂"}).json()["tokens"]
    body = rig.client.post("/detokenize", json={"tokens": tokens}).json()
    assert body == {"prompt": "Łódź 🙂"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "x" * 101}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [3, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [3, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]"),
    ],
)
def test_a_bad_field_is_named(shared: HttpRig, path: str, fields: dict, param: str) -> None:
    assert shared.refused(path, **fields)["param"] == param

"""POST /tokenize and /detokenize."""

from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.text.letters import ids_of


def test_a_prompt_has_bos_in_front(rig: HttpRig) -> None:
    body = rig.client.post("/tokenize", json={"prompt": "ab"}).json()
    tokens = [0, *ids_of("ab")]
    assert body == {"count": 3, "max_model_len": 100, "tokens": tokens, "token_strs": None}


def test_a_prompt_without_bos(rig: HttpRig) -> None:
    fields = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    body = rig.client.post("/tokenize", json=fields).json()
    assert (body["tokens"], body["token_strs"]) == (ids_of("ab"), ["a", "b"])


def test_a_conversation(rig: HttpRig) -> None:
    """Texts of messages are not templates."""
    messages = [{"role": "user", "content": "{{ 7 * 7 }}"}]
    body = rig.client.post("/tokenize", json={"messages": messages}).json()
    assert body["tokens"] == ids_of("[user]{{ 7 * 7 }}[assistant]")


def test_there_and_back(rig: HttpRig) -> None:
    tokens = rig.client.post("/tokenize", json={"prompt": "Łódź 🙂"}).json()["tokens"]
    body = rig.client.post("/detokenize", json={"tokens": tokens}).json()
    assert body == {"prompt": "Łódź 🙂"}

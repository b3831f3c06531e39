import ast
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text.chat import ChatTemplate
from tests import golden

PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": letter} for letter in "ab"]}]


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def rendered(folder: Path, **values: Any) -> str:
    template = ChatTemplate.from_folder(folder)
    return template.render(HI, **values)


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    assert ChatTemplate.from_folder(tmp_path) is None


def test_the_first_file_wins(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "third"})
    assert rendered(tmp_path) == "third"
    write(tmp_path, "chat_template.json", {"chat_template": "second"})
    assert rendered(tmp_path) == "second"
    write(tmp_path, "chat_template.jinja", "first é")
    assert rendered(tmp_path) == "first é"


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]


@pytest.mark.parametrize("content", [NAMED, {"default": "plain", "tool_use": "with tools"}])
def test_named_templates(tmp_path: Path, content: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": content})
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, tools=[{}]) == "with tools"


@pytest.mark.parametrize("text", ["<s>", {"content": "<s>", "lstrip": False}])
def test_special_tokens_come_from_the_tokenizer_configuration(tmp_path: Path, text: Any) -> None:
    write(tmp_path, "chat_template.jinja", PLAIN + "{{ eos_token }}{{ pad_token }}")
    write(tmp_path, "tokenizer_config.json", {"bos_token": text, "eos_token": "</s>"})
    assert rendered(tmp_path) == "<s>user:Hi;assistant:</s>"


def test_broken_templates(tmp_path: Path) -> None:
    """`golden/text/broken_templates.txt` lists files with their contents."""

    def read(mistake: str) -> None:
        name, content = mistake.split(" ", 1)
        write(tmp_path, name, content)
        try:
            ChatTemplate.from_folder(tmp_path)
        finally:
            (tmp_path / name).unlink()

    golden.check_refused("text/broken_templates.txt", CheckpointError, read, tmp_path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.from_folder(tmp_path)


def test_wrong_messages_and_tools_are_named() -> None:
    """`golden/text/wrong_messages.txt` lists them."""

    def call(mistake: str) -> None:
        ChatTemplate({"default": PLAIN}).render(**{"messages": HI} | ast.literal_eval(mistake))

    golden.check_refused("text/wrong_messages.txt", InvalidRequestError, call)


def test_errors_name_the_field_as_the_caller_does() -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages\[3\]\[0\]\.role: is missing"):
        ChatTemplate({"default": PLAIN}).render([{}], field="messages[3]")


def test_rendered() -> None:
    """`golden/text/rendered.txt` lists templates and messages, and options.

    A template that knows no parts of contents gets their text, one a line.
    """

    def call(source: str, messages: list[Any], **options: Any) -> str:
        return ChatTemplate({"default": source}).render(messages, **options)

    golden.check_values("text/rendered.txt", call, globals())


def test_the_templates_refusal_and_failure() -> None:
    refusing = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(InvalidRequestError, match=r"^messages: .* refuses: roles must alternate$"):
        refusing.render(HI)
    failing = ChatTemplate({"default": "\n{{ messages[0].content + 1 }}"})
    with pytest.raises(InvalidRequestError, match=r"^messages: the chat template failed: line 2: "):
        failing.render(HI)


def test_switches_are_what_the_template_reads_and_a_few_known_ones() -> None:
    template = ChatTemplate(
        {"default": PLAIN + "{{ style }}{% if enable_thinking is false %}quick{% endif %}"}
    )
    known = {"enable_thinking", "thinking", "reasoning_effort", "documents"}
    assert template.switches == {"style", *known}
    switches = {"style": "x", "enable_thinking": False, "reasoning_effort": "low"}
    assert template.render(HI, chat_template_kwargs=switches) == "user:Hi;assistant:xquick"


@pytest.mark.parametrize(
    "name", ["bos_token", "messages", "raise_exception", "range", "call_method", "other", "self"]
)
def test_other_names_are_refused(name: str) -> None:
    template = ChatTemplate({"default": PLAIN + "{{ range(2) }}{{ raise_exception }}"})
    with pytest.raises(InvalidRequestError, match=rf"^chat_template_kwargs\.{name}: is no switch"):
        template.render(HI, chat_template_kwargs={name: "x"})


def test_a_switch_is_json() -> None:
    with pytest.raises(InvalidRequestError, match=r"^chat_template_kwargs\.thinking\[0\]: object"):
        ChatTemplate({"default": PLAIN}).render(HI, chat_template_kwargs={"thinking": [object()]})

"""Forms of messages that chat templates expect, by small templates like released ones."""

from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.messages import MessageForm
from jaxserve.text.template import CheckedTemplate
from tests import golden
from tests.jaxserve.text.conversations import call

QUESTION = {"role": "user", "content": "Now?"}
CALL = call('{"city":"Łódź", "n": 2.0}', "clock", refusal=None, function_call=None)


def calls(body: str) -> str:
    """A template that writes every message's content and its calls by `body`."""
    return (
        "{% for m in messages %}{% if m.content is string and 'x' in m.content %}!{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{{{{ f.name }}}} {body}{{% endfor %}}{{% endfor %}}"
    )


COPIES = calls("{{ f.arguments if f.arguments is string else f.arguments | tojson }}")
ITERATES = calls("{% for k, v in f.arguments | items %}<{{ k }}={{ v }}>{% endfor %}")
JOINS = calls("{{ 'json ' + f.arguments }}")


def test_a_call_without_content() -> None:
    """`golden/text/call_forms.txt` lists templates, each with what it makes of a call."""
    without = {key: value for key, value in CALL.items() if key != "content"}

    def rendered(source: str) -> str:
        template = ChatTemplate({"default": source})
        each = (CALL, {**CALL, "content": ""}, without)
        (text,) = {template.render([QUESTION, message]) for message in each}
        return text

    golden.check_values("text/call_forms.txt", rendered, globals())


def test_arguments_that_are_objects_already() -> None:
    function = {"name": "clock", "arguments": {"city": "Łódź"}}
    message = {**CALL, "tool_calls": [{"function": function}]}
    for source, expected in ((JOINS, 'json {"city": "Łódź"}'), (ITERATES, "<city=Łódź>")):
        text = ChatTemplate({"default": source}).render([QUESTION, message])
        assert text == f"<user>Now?<assistant>clock {expected}"


@pytest.mark.parametrize("arguments", ['{"city": "Łó', "[1]", "5"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    function = {"name": "clock", "arguments": arguments}
    message = {**CALL, "tool_calls": [{"function": function}]}
    field = r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments"
    with pytest.raises(InvalidRequestError, match=f"{field}: is no JSON object$"):
        ChatTemplate({"default": ITERATES}).render([QUESTION, message])
    assert arguments in ChatTemplate({"default": COPIES}).render([QUESTION, message])


@golden.table("text/parts_of_roles.yaml")
def test_whose_parts_are_read(source: str, roles: tuple[str, ...]) -> None:
    assert MessageForm.of(CheckedTemplate(source), {}).part_roles == set(roles)


def test_the_developer_is_the_system_where_a_template_does_not_know_it() -> None:
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    messages = [{"role": "developer", "content": "Be brief."}]
    assert ChatTemplate({"default": source}).render(messages) == "system"
    assert ChatTemplate({"default": source + "{# developer #}"}).render(messages) == "developer"


def test_both_names_of_the_reasoning() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
    template = ChatTemplate({"default": source})
    for given in ("reasoning", "reasoning_content"):
        message: dict[str, Any] = {"role": "assistant", "content": "x", given: "Hm."}
        assert template.render([message]) == "Hm.Hm."

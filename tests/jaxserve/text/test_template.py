"""Templates rendered in the worker give what Jinja2 gives as transformers sets it up."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies

from jaxserve.text.template import CheckedTemplate, TemplateError, TemplateRefusal, plain
from tests import golden
from tests.jaxserve.text.conversations import CONVERSATIONS, OBJECT_CONVERSATIONS, TOOLS
from tests.jaxserve.text.jinja2_oracle import jinja2_render

FOLDER = Path(__file__).parents[2] / "reference" / "chat_templates"
FAMILIES = yaml.safe_load(golden.text("text/special_tokens.yaml"))


parsed = functools.cache(CheckedTemplate)


def render(source: str, **values: Any) -> str:
    return parsed(source).render({name: plain(value, name=name) for name, value in values.items()})


def read(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")


def same(source: str, **values: Any) -> str:
    """Renders with the worker and with Jinja2, which must agree, and returns the text."""
    text = render(source, **values)
    assert text == jinja2_render(source, copy.deepcopy(values))
    return text


@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["none", "tools", "empty"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_renders_every_conversation_alike(family, tools):
    source = read(family)
    conversations = list(CONVERSATIONS.values())
    if "tojson" in source:
        conversations += OBJECT_CONVERSATIONS.values()
    switches: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    for messages, prompt, switch in itertools.product(conversations, (True, False), switches):
        values = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        same(source, **values, **switch, **FAMILIES[family])


TURNS = {"messages": CONVERSATIONS["turns"]}
TEXTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": TURNS,
    "deepseek_r1": TURNS,
    "step3": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "kimi_k2": {
        "messages": CONVERSATIONS["a call and its answer"],
        "tools": [{"type": "function"}],
    },
    "qwen3": {"messages": OBJECT_CONVERSATIONS["a call with thoughts"], "enable_thinking": False},
}


def test_the_text_of_every_family():
    found = {}
    for family, asked in TEXTS.items():
        values = {"tools": None, "add_generation_prompt": True, **asked, **FAMILIES[family]}
        found[family] = same(read(family), **values)
    golden.check("text/templates.json", found)


VALUES = yaml.safe_load(golden.text("text/values.yaml"))


@golden.table("text/alike.yaml")
def test_alike(source):
    same(source, **VALUES)


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**70), 2**70)
    | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.text(),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=4), inner, max_size=3)
    ),
)


@given(JSON)
def test_json_of_any_value(value):
    same("{{ v | tojson }}{{ [v] | tojson(indent=1) }}", v=value)


@given(strategies.text(alphabet="{}%#-+'\"\\ \nx.split(),[]|", max_size=40))
def test_any_text_is_a_template_or_a_clear_error(source):
    with contextlib.suppress(TemplateError):
        render(source, x="a b")


def test_what_does_not_work_is_a_clear_error():
    """`golden/text/wrong_templates.txt` lists templates."""

    def call(source: str) -> None:
        render(source, s="a", d={})

    golden.check_refused("text/wrong_templates.txt", TemplateError, call)
    with pytest.raises(TemplateError, match="it calls itself too deeply"):
        call("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}")


def test_a_template_cannot_change_what_it_is_given():
    messages = [{"role": "user", "content": [{"type": "text"}]}]
    before = copy.deepcopy(messages)
    render(
        "{{ m.append(1) }}{{ m[0].update({'role': 'x'}) }}{{ m[0].content.clear() }}", m=messages
    )
    assert messages == before


def test_json_becomes_an_object():
    assert render("{{ (s | from_json).a[1] }}", s='{"a": [1, 2]}') == "2"


def test_a_refusal_is_the_templates_own():
    with pytest.raises(TemplateRefusal, match=r"^no 3$"):
        render("{{ raise_exception('no ' ~ n) }}", n=3)


def test_variables_are_what_the_caller_may_set():
    source = (
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% set ns = namespace(x=1) %}{% for m in messages %}{{ m.role.upper() }}{{ loop.index }}"
        "{{ strftime_now('%d') }}{% endfor %}{% macro f(a) %}{{ a }}{{ outer }}{% endmacro %}"
    )
    assert CheckedTemplate(source).variables >= {"messages", "enable_thinking", "outer"}
    assert CheckedTemplate(source).variables <= {"messages", "enable_thinking", "outer"}


def nested(depth: int, wrap: Callable[[Any], Any] = lambda value: [value]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def test_what_is_no_json_is_named():
    call = functools.partial(plain, name="v")
    golden.check_arguments("text/no_json.txt", ValueError, call, globals())


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}])
def test_the_depth_that_is_allowed(wrap):
    assert plain(nested(63, wrap), name="v") == nested(63, wrap)
    with pytest.raises(ValueError, match=r"is nested too deeply$"):
        plain(nested(64, wrap), name="v")


def test_plain_copies():
    value = {"a": [1, ("x", None, True, 1.5)]}
    result = plain(value, name="v")
    assert result == {"a": [1, ["x", None, True, 1.5]]}
    assert result["a"] is not value["a"]

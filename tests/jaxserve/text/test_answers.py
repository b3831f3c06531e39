"""Answers of every family, taken apart whole and in every cut."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.answers import CALL_FORMATS, AnswerFormat, AnswerParser, Piece
from jaxserve.text.chat import ChatTemplate
from tests.jaxserve.text.conversations import TOOLS

TEMPLATES = Path(__file__).resolve().parents[2] / "reference" / "chat_templates"
JSON, DEEPSEEK, KIMI, STEP = CALL_FORMATS


def template_of(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""})


def whole(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the calls' names and arguments."""
    return (
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        [(piece.call.name, piece.call.arguments) for piece in pieces if piece.call is not None],
    )


def parse(parser: AnswerParser, *texts: str) -> tuple[str, str, list[tuple[str, str]]]:
    pieces = [piece for text in texts for piece in parser.push(text)]
    return whole(pieces + parser.finish())


QWEN_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Łódź"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
KIMI_CALLS = (
    "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Łódź"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
STEP_CALLS = '<|CALL_START|>function\nweather\n{"city": "Łódź"}\nfunction\nnow\n{}<|CALL_END|>'
CALLS = [("weather", '{"city": "Łódź"}'), ("now", "{}")]
FAMILIES = [(JSON, QWEN_CALLS), (DEEPSEEK, DEEPSEEK_CALLS), (KIMI, KIMI_CALLS), (STEP, STEP_CALLS)]


@pytest.mark.parametrize(("form", "written"), FAMILIES)
def test_calls(form, written) -> None:
    parser = AnswerParser(thinks=True, thinking=False, calls=form)
    text = f"<think>\nA town.\n</think>\n\nLet me see.\n{written}"
    assert parse(parser, text) == ("A town.", "Let me see.\n", CALLS)
    assert parser.called


@pytest.mark.parametrize(("form", "written"), FAMILIES)
@given(cuts=st.lists(st.integers(0, 260), max_size=12))
def test_the_cut_makes_no_difference(form, written, cuts) -> None:
    text = f"\nHm < 5 <think\n\n</think>\nSee <tool <| {written} done"
    places = [0, *sorted(cuts), len(text)]
    texts = [text[a:b] for a, b in itertools.pairwise(places)]
    parsers = [AnswerParser(thinks=True, thinking=True, calls=form) for _ in range(3)]
    expected = ("Hm < 5 <think", "See <tool <|  done", CALLS)
    assert parse(parsers[0], text) == expected
    assert parse(parsers[1], *texts) == expected
    assert parse(parsers[2], *text) == expected


def test_kimis_ids_are_kept() -> None:
    pieces = AnswerParser(False, False, KIMI).push(KIMI_CALLS)
    assert [piece.call.id for piece in pieces if piece.call] == [
        "functions.weather:0",
        "functions.now:1",
    ]


def test_other_ids_are_made_up_and_differ() -> None:
    pieces = AnswerParser(False, False, JSON).push(QWEN_CALLS)
    ids = [piece.call.id for piece in pieces if piece.call]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (JSON, "<tool_call>{not json}</tool_call>"),
        (JSON, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (JSON, "<tool_call>[1]</tool_call>"),
        (JSON, '<tool_call>{"name": "x", "argum'),
        (JSON, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        (KIMI, "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
        (STEP, "<|CALL_START|>function\nx\n{<|CALL_END|>"),
        (STEP, "<|CALL_START|>function\nx\n{} and more<|CALL_END|>"),
    ],
)
def test_what_is_no_call_is_text(form, text) -> None:
    parser = AnswerParser(thinks=False, thinking=False, calls=form)
    assert parse(parser, text + "") == ("", text, [])
    assert not parser.called


def test_a_call_that_is_cut_off_but_whole_counts() -> None:
    """The end mark may be the token that ended the request."""
    parser = AnswerParser(thinks=False, thinking=False, calls=JSON)
    assert parse(parser, QWEN_CALLS.removesuffix("</tool_call>")) == ("", "", CALLS)


def test_more_calls_than_allowed_stay_text() -> None:
    one = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    _, content, calls = parse(AnswerParser(False, False, JSON), one * 130)
    assert len(calls) == 128
    assert content == one * 2


def test_without_tools_calls_are_text() -> None:
    form = AnswerFormat(thinks=False, calls=JSON)
    assert parse(form.parser("", tools=False), QWEN_CALLS)[1:] == (QWEN_CALLS, [])


def test_a_thought_without_end() -> None:
    assert parse(AnswerParser(True, True, None), "Hm.\n\n") == ("Hm.", "", [])
    assert parse(AnswerParser(True, False, None), " <thi") == ("", " <thi", [])


def test_who_does_not_think_may_write_the_mark() -> None:
    assert parse(AnswerParser(False, False, None), "<think>x</think>")[0] == ""


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3", JSON), ("deepseek_v3", DEEPSEEK), ("kimi_k2", KIMI), ("step3", STEP)],
)
def test_a_family_reads_the_calls_that_its_template_writes(name, form) -> None:
    """What the template writes of a call, the parser takes apart again."""
    template = template_of(name)
    found = AnswerFormat.of(template)
    assert found.calls is form
    arguments = '{"city": "Łódź", "days": 2}'
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "functions.weather:0", "type": "function", "function": function}
    question = {"role": "user", "content": "How is it?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = template.render([question], tools=TOOLS, add_generation_prompt=True)
    both = template.render([question, answer], tools=TOOLS, add_generation_prompt=False)
    written = both[both.index("How is it?") + len("How is it?") :]
    _, _, calls = parse(AnswerParser(found.thinks, False, found.calls), written)
    ((read_name, read_arguments),) = calls
    assert read_name == "weather"
    assert json.loads(read_arguments) == json.loads(arguments)
    assert prompt


def test_a_prompt_may_begin_the_thought() -> None:
    template = template_of("deepseek_r1")
    prompt = template.render([{"role": "user", "content": "x"}])
    parser = AnswerFormat.of(template).parser(prompt, tools=False)
    assert parse(parser, "Hm.\n</think>\n\nYes.") == ("Hm.", "Yes.", [])

"""Answers of every family, taken apart whole and in every cut."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.answers import AnswerFormat, AnswerParser, Piece, calls_of
from jaxserve.text.calls import DEEPSEEK, DEEPSEEK_V31, JSON, KIMI, QWEN_XML, STEP, STEPTML
from jaxserve.text.chat import ChatTemplate
from tests.jaxserve.text.conversations import TOOLS

TEMPLATES = Path(__file__).resolve().parents[2] / "reference" / "chat_templates"


def template_of(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""})


def whole(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the calls' names and arguments."""
    return (
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        [(call.name, call.arguments) for call in calls_of(pieces)],
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
DEEPSEEK_V31_CALLS = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Łódź"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
QWEN_XML_CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
STEPTML_CALLS = (
    "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather"><steptml:parameter name="city">Łódź</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>'
)
CALLS = [("weather", '{"city": "Łódź"}'), ("now", "{}")]
FAMILIES = [
    (JSON, QWEN_CALLS),
    (DEEPSEEK, DEEPSEEK_CALLS),
    (KIMI, KIMI_CALLS),
    (STEP, STEP_CALLS),
    (DEEPSEEK_V31, DEEPSEEK_V31_CALLS),
    (QWEN_XML, QWEN_XML_CALLS),
    (STEPTML, STEPTML_CALLS),
]


@pytest.mark.parametrize(("form", "written"), FAMILIES)
@given(cuts=st.lists(st.integers(0, 260), max_size=12), thinking=st.booleans())
def test_the_cut_makes_no_difference(form, written, cuts, thinking) -> None:
    """The thought begins in the prompt or in the answer."""
    begun = "" if thinking else "<think>"
    text = f"{begun}\nHm < 5 <think\n\n</think>\nSee <tool <| {written} done"
    places = [0, *sorted(cuts), len(text)]
    texts = [text[a:b] for a, b in itertools.pairwise(places)]
    for parts in ([text], texts, [*text]):
        parser = AnswerParser(thinks=True, thinking=thinking, calls=form)
        assert parse(parser, *parts) == ("Hm < 5 <think", "See <tool <|  done", CALLS)
        assert parser.called


def with_text(form, written, text) -> str:
    """Calls as a family writes them, with another text in place of the town's name."""
    return written.replace(
        "Łódź", text if form.parameter else json.dumps(text, ensure_ascii=False)[1:-1]
    )


@pytest.mark.parametrize(("form", "written"), FAMILIES)
@pytest.mark.parametrize(
    "text", ["say {end} there", "{end}", 'a "{end}" \\', "{begin}{end}{end}", "x\n{end}\ny"]
)
def test_a_value_may_hold_the_mark_that_ends_calls(form, written, text) -> None:
    text = text.format(begin=form.begin, end=form.end)
    written = f"See {with_text(form, written, text)} done"
    for texts in ([written], [*written], itertools.batched(written, 7)):
        parser = AnswerParser(False, False, form, TOOLS)
        _, content, calls = parse(parser, *map("".join, texts))
        assert content == "See  done"
        assert [name for name, _ in calls] == ["weather", "now"]
        assert [json.loads(arguments) for _, arguments in calls] == [{"city": text}, {}]


@pytest.mark.parametrize(
    "form_and_tail", [(KIMI, "<|tool_call_end|>"), (DEEPSEEK_V31, "<｜tool▁call▁end｜>")]
)
def test_a_value_may_hold_the_mark_that_ends_a_call(form_and_tail) -> None:
    form, tail = form_and_tail
    written = with_text(form, dict(FAMILIES)[form], f"say {tail} there")
    for texts in ([written], [*written]):
        _, content, calls = parse(AnswerParser(False, False, form), *texts)
        assert content == ""
        found = [json.loads(arguments) for _, arguments in calls]
        assert found == [{"city": f"say {tail} there"}, {}]


@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {"a": "</tool_call>"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"</tool_call>\\"}"}',
    ],
)
def test_json_in_another_order_and_arguments_as_text(body) -> None:
    for texts in ([body], [*body]):
        parser = AnswerParser(False, False, JSON)
        ((name, arguments),) = parse(parser, "<tool_call>", *texts, "</tool_call>")[2]
        assert (name, json.loads(arguments)) == ("f", {"a": "</tool_call>"})


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        # A string that was never closed holds no mark behind its line.
        (JSON, '{"name": "f", "arguments": {"a": "x}\n</tool_call> done', " done", '{"a": "x}\n'),
        (KIMI, '{"a": "x\n<|tool_call_end|>{end} done', " done", '{"a": "x'),
        # Both end tags were forgotten.
        (QWEN_XML, "<function=f>\n<parameter=a>\nx\n</tool_call> done", " done", "{}"),
    ],
)
def test_the_mark_ends_a_value_that_never_does(form, text, content, arguments) -> None:
    head = "<|tool_call_begin|>f:0<|tool_call_argument_begin|>" if form is KIMI else ""
    text = f"{form.begin}{head}{text.replace('{end}', form.end)}"
    for texts in ([text], [*text]):
        _, said, calls = parse(AnswerParser(False, False, form), *texts)
        assert (said, [call[1] for call in calls]) == (content, [arguments])


def test_kimis_ids_are_kept_and_others_are_made_up() -> None:
    pieces = [AnswerParser(False, False, KIMI).push(KIMI_CALLS)]
    pieces += [AnswerParser(False, False, JSON).push(QWEN_CALLS)]
    kept, made = ([piece.call.id for piece in some if piece.call] for some in pieces)
    assert kept == ["functions.weather:0", "functions.now:1"]
    assert len(set(made)) == 2
    assert all(call_id.startswith("call_") for call_id in made)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (JSON, "<tool_call>{not json}</tool_call>"),
        (JSON, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (JSON, "<tool_call>[1]</tool_call>"),
        (JSON, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        (KIMI, "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
        (STEP, "<|CALL_START|>function\nx\n5<|CALL_END|>"),
        (JSON, "<tool_call>" + "x" * 70_000 + "</tool_call>"),
        (QWEN_XML, "<tool_call>nothing</tool_call>"),
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


@pytest.mark.parametrize(("form", "written"), FAMILIES)
def test_arguments_come_while_they_are_written(form, written) -> None:
    """Before the call is complete, and as what it will be."""
    parser = AnswerParser(False, False, form)
    cut = written.index("dź") + (len("dź</steptml:parameter>") if form is STEPTML else 4)
    pieces = parser.push(written[:cut]) + parser.push("")
    if form is QWEN_XML:
        pieces += parser.push(written[cut : written.index("</function>")])
    (call,) = calls_of(pieces)
    assert call.name == "weather"
    assert call.arguments.startswith('{"city": "Łódź')


@pytest.mark.parametrize(("form", "written"), FAMILIES)
def test_a_call_that_is_cut_off_is_a_part_of_a_call(form, written) -> None:
    """Wherever it ends: no markup in the content, and nothing that the call would not have."""
    for end in range(len(written)):
        parser = AnswerParser(False, False, form)
        pieces = parser.push(written[:end]) + parser.finish(cut=True)
        _, content, calls = whole(pieces)
        assert content.strip() in form.begin[:-1]
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, CALLS, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)


SCHEMA = {
    "a": {"type": "integer"},
    "b": {"type": ["string", "null"]},
    "c": {"anyOf": [{"type": "object"}, {"type": "boolean"}]},
    "d": {"enum": ["1", "2"]},
    "e": {"$ref": "#/$defs/E"},
    "g": {},
    "h": {"allOf": [{"type": "integer"}]},
}
TYPED = [{"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMA}}}]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("a", "5", 5),
        ("a", "five", "five"),
        ("b", "5", 5),
        ("b", "None", None),
        ("b", 'say "x"\n\n y', 'say "x"\n\n y'),
        ("c", '{"x": [1]}', {"x": [1]}),
        ("c", "True", True),
        ("d", "1", "1"),
        ("e", '{"x": 1}', {"x": 1}),
        ("e", "red", "red"),
        ("g", "[1]", [1]),
        ("h", "7", 7),
        ("g", "NaN", "NaN"),
        ("g", '"\\ud800"', "\ud800"),
        ("other", "1", "1"),
    ],
)
def test_values_of_elements_have_the_schemas_types(key, value, expected) -> None:
    parser = AnswerParser(False, False, QWEN_XML, TYPED)
    written = f"<parameter={key}>\n{value}\n</parameter>"
    text = f"<tool_call>\n<function=f>\n{written}\n</function>\n</tool_call>"
    _, _, ((name, arguments),) = parse(parser, *text)
    assert (name, json.loads(arguments)) == ("f", {key: expected})
    arguments.encode()


def test_an_end_tag_that_the_model_forgot() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\nx\n</function>\n</tool_call>"
    )
    _, content, ((_, arguments),) = parse(AnswerParser(False, False, QWEN_XML, TYPED), *text)
    assert (content, json.loads(arguments)) == ("", {"a": 1, "b": "x"})


@pytest.mark.parametrize("cut", [False, True])
def test_no_text_is_lost_without_the_end_of_a_call(cut: bool) -> None:
    prose = "This is how calls look. " * 20
    calls = '<tool_call>{"name": "x", "arguments": {}}'
    for text, content, found in (
        (f"<tool_call>{prose}", f"<tool_call>{prose}", []),
        (f"{calls} {prose}", prose, [("x", "{}")]),
    ):
        parser = AnswerParser(False, False, JSON)
        pieces = [piece for letter in text for piece in parser.push(letter)]
        _, said, made = whole(pieces + parser.finish(cut=cut))
        assert (said.strip(), made) == (content.strip(), found)


@pytest.mark.parametrize(
    ("continued", "text", "expected"),
    [
        ("One", "\n\nTwo", ("", "\n\nTwo", [])),
        ("<think>", "\nHm.</think>\n\nSee.", ("Hm.", "See.", [])),
        ("<think>Hm", "\nyes.</think>See.", ("\nyes.", "See.", [])),
        ("<think>Hm</think>\n", "\nSee.", ("", "See.", [])),
        ("One", "<think>", ("", "<think>", [])),
    ],
)
def test_an_answer_that_is_continued(continued: str, text: str, expected: tuple) -> None:
    form = AnswerFormat(thinks=True, calls=None)
    assert parse(form.parser(f"[user]x{continued}", None, continued=continued), *text) == expected


def test_more_calls_than_allowed_are_left_out() -> None:
    one = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    _, content, calls = parse(AnswerParser(False, False, JSON), one * 130)
    assert (len(calls), content) == (128, "")
    form = AnswerFormat(thinks=False, calls=JSON)
    assert parse(form.parser("", [], max_calls=1), one * 3) == ("", "", [("x", "{}")])


def test_without_tools_calls_are_text() -> None:
    form = AnswerFormat(thinks=False, calls=JSON)
    assert parse(form.parser("", None), QWEN_CALLS)[1:] == (QWEN_CALLS, [])


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
    """The parser takes apart the call that the template has written."""
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
    parser = AnswerFormat.of(template).parser(prompt, None)
    assert parse(parser, "Hm.\n</think>\n\nYes.") == ("Hm.", "Yes.", [])

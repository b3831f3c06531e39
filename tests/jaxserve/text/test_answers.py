"""Answers of every family, taken apart whole and in every cut."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import calls as formats
from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.answers import AnswerParser, Piece, joined
from jaxserve.text.calls import DEEPSEEK, GLM, JSON, KIMI, MINIMAX, QWEN_XML, STEP
from jaxserve.text.chat import ChatTemplate
from tests import golden
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
        [(one.call.name, one.call.arguments) for one in joined(pieces) if one.call],
    )


def parse(parser: AnswerParser, *texts: str) -> tuple[str, str, list[tuple[str, str]]]:
    pieces = [piece for text in texts for piece in parser.push(text)]
    return whole(pieces + parser.finish())


CALLS = [("weather", '{"city": "Łódź"}'), ("now", "{}")]
WRITTEN = json.loads((golden.FOLDER / "text" / "two_calls.json").read_text(encoding="utf-8"))
FORMS = {name: getattr(formats, name) for name in WRITTEN}
FAMILIES = [pytest.param(form, WRITTEN[name], id=name) for name, form in FORMS.items()]
"""Two calls, as each family writes them."""
QWEN_CALLS = WRITTEN["JSON"]


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
    ("name", "tail"), [("KIMI", "<|tool_call_end|>"), ("DEEPSEEK_V31", "<｜tool▁call▁end｜>")]
)
def test_a_value_may_hold_the_mark_that_ends_a_call(name, tail) -> None:
    form = FORMS[name]
    written = with_text(form, WRITTEN[name], f"say {tail} there")
    for texts in ([written], [*written]):
        _, content, calls = parse(AnswerParser(False, False, form), *texts)
        assert content == ""
        found = [json.loads(arguments) for _, arguments in calls]
        assert found == [{"city": f"say {tail} there"}, {}]


def test_kimis_ids_are_kept_and_others_are_made_up() -> None:
    pieces = [AnswerParser(False, False, KIMI).push(WRITTEN["KIMI"])]
    pieces += [AnswerParser(False, False, JSON).push(QWEN_CALLS)]
    kept, made = ([piece.call.id for piece in some if piece.call] for some in pieces)
    assert kept == ["functions.weather:0", "functions.now:1"]
    assert len(set(made)) == 2
    assert all(call_id.startswith("call_") for call_id in made)


@pytest.mark.parametrize(("form", "written"), FAMILIES)
def test_arguments_come_while_they_are_written(form, written) -> None:
    """Before the call is complete, and as what it will be."""
    parser = AnswerParser(False, False, form)
    closing = form.parameter[1].strip() if form.parameter and form is not QWEN_XML else "  "
    cut = written.index("dź") + len(f"dź{closing}")
    pieces = parser.push(written[:cut]) + parser.push("")
    if form is QWEN_XML:
        pieces += parser.push(written[cut : written.index("</function>")])
    (call,) = (piece.call for piece in joined(pieces) if piece.call)
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


TYPED = yaml.safe_load(golden.text("text/typed_tools.yaml"))


def test_answers() -> None:
    """`golden/text/answers.txt` lists arguments of `AnswerParser` and the text of an answer."""

    def said(line: str) -> str:
        first, text = line.split("\n")
        arguments, text = eval(first, globals() | FORMS), eval(text)
        found = parse(parser := AnswerParser(*arguments), text)
        assert parser.called == bool(found[2])
        assert parse(AnswerParser(*arguments), *text) == found
        reasoning, content, calls = found
        content = "the text" if content == text else repr(content)
        return "\n".join([f"{reasoning!r}, {content}", *(" ".join(call) for call in calls)])

    golden.check_each("text/answers.txt", said)


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


@golden.table("text/continued_answers.yaml")
def test_an_answer_that_is_continued(continued: str, text: str, expected: list) -> None:
    form = AnswerMarkers(thinks=True, calls=None)
    parser = form.parser(f"[user]x{continued}", None, continued=continued)
    assert [*parse(parser, *text)] == expected


def test_more_calls_than_allowed_are_left_out() -> None:
    one = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    _, content, calls = parse(AnswerParser(False, False, JSON), one * 130)
    assert (len(calls), content) == (128, "")
    form = AnswerMarkers(thinks=False, calls=JSON)
    assert parse(form.parser("", [], max_calls=1), one * 3) == ("", "", [("x", "{}")])


DAYS = {"function": {"name": "weather", "parameters": {"properties": {"days": {}}}}}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("qwen3", JSON), ("deepseek_v3", DEEPSEEK), ("kimi_k2", KIMI), ("step3", STEP)),
        *(("glm4_moe", GLM), ("minimax_m2", MINIMAX), ("qwen3_5", QWEN_XML)),
    ],
)
def test_a_family_reads_the_calls_that_its_template_writes(name, form) -> None:
    """The parser takes apart the call that the template has written."""
    template = template_of(name)
    found = AnswerMarkers.of(template)
    assert found.calls is form
    arguments = '{"city": "Łódź", "days": 2}'
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "functions.weather:0", "type": "function", "function": function}
    question = {"role": "user", "content": "How is it?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = template.render([question], tools=TOOLS, add_generation_prompt=True)
    both = template.render([question, answer], tools=TOOLS, add_generation_prompt=False)
    written = both[both.index("How is it?") + len("How is it?") :]
    _, _, calls = parse(AnswerParser(found.thinks, False, found.calls, [DAYS]), written)
    ((read_name, read_arguments),) = calls
    assert read_name == "weather"
    assert json.loads(read_arguments) == json.loads(arguments)
    assert prompt


def test_a_prompt_may_begin_the_thought() -> None:
    template = template_of("deepseek_r1")
    prompt = template.render([{"role": "user", "content": "x"}])
    parser = AnswerMarkers.of(template).parser(prompt, None)
    assert parse(parser, "Hm.\n</think>\n\nYes.") == ("Hm.", "Yes.", [])

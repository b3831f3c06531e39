"""Answers of gpt-oss, taken apart whole and in every cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.answer_format import AnswerMarkers, HarmonyParser
from jaxserve.text.calls import HARMONY
from tests import golden
from tests.jaxserve.text.conversations import TOOLS
from tests.jaxserve.text.test_answers import parse, template_of

THOUGHT = "<|channel|>analysis<|message|>Hm <| 5<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
CALLS = [("weather", '{"city": "Łódź"}'), ("now", "{}")]
TEXT = f"{THOUGHT}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
TEXT += "<|start|>assistant".join(CALL.format(*call) for call in CALLS)
TEXT += "<|start|>assistant<|channel|>final<|message|>1 < 2 <|enough<|return|>"


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_the_cut_makes_no_difference(cuts) -> None:
    parts = [TEXT[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(TEXT)])]
    for texts in ([TEXT], parts, [*TEXT]):
        parser = HarmonyParser(TOOLS, 9)
        assert parse(parser, *texts) == ("Hm <| 5", "Let me see.\n1 < 2 <|enough", CALLS)
        assert parser.called


def test_answers() -> None:
    """`golden/text/harmony.txt` lists arguments of the parser and the text of an answer."""

    def said(line: str) -> str:
        options, text = (eval(part) for part in line.split("\n")[-2:])
        arguments = {"tools": TOOLS, "max_calls": 9} | options
        found = parse(HarmonyParser(**arguments), text)
        assert parse(HarmonyParser(**arguments), *text) == found
        return str(found)

    golden.check_each("text/harmony.txt", said)


def test_an_answer_that_is_cut_off_has_no_markup() -> None:
    for end in range(len(TEXT)):
        parser = HarmonyParser(TOOLS, 9)
        pieces = parser.push(TEXT[:end]) + parser.finish(cut=True)
        said = "".join(piece.reasoning + piece.content for piece in pieces)
        marks = ("channel", "message", "start", "assistant", "end|")
        assert not any(mark in said for mark in marks)


def test_a_template_shows_the_form_and_its_calls_are_read() -> None:
    template = template_of("gpt_oss")
    form = AnswerMarkers.of(template)
    assert form.calls is HARMONY
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}, "id": "1"}
    call["type"] = "function"
    answer = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    question = {"role": "user", "content": "How is it?"}
    prompt = template.render([question], tools=TOOLS)
    both = template.render([question, answer], tools=TOOLS, add_generation_prompt=False)
    assert both.startswith(prompt)
    found = parse(form.parser(prompt, TOOLS), both.removeprefix(prompt))
    assert found == ("Hm.", "", [("weather", '{"city": "Oslo"}')])
    assert (form.spelt(None), form.before_content(prompt)) == (
        "<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    )
    assert parse(form.parser("x", TOOLS, continued="I say"), " so.") == ("", " so.", [])


def test_a_forced_call_is_one_that_is_read() -> None:
    (rule, arguments) = HARMONY.rules("now", 0, {"type": "object"}, 0)
    assert rule == 'call0: "now <|constrain|>json<|message|>" arguments0'
    assert arguments == 'arguments0: %json {"type": "object"}'
    written = HARMONY.begin + HARMONY.around[0].format(name="now") + "{}"
    assert parse(HarmonyParser(TOOLS, 9), written) == ("", "", [("now", "{}")])

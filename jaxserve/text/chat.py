"""Turns conversations into prompts with the chat templates of a model folder.

Called by `llm.py` and the network faces, which pass messages as their clients wrote them: JSON
data in the format of OpenAI's API. `messages.py` checks it and brings it into the form that the
template reads. Knows nothing of engines, networks or token ids.

Folders of DeepSeek-V3.2 and V4 have a Python script in place of a template. The script is not run.
It is parsed, and the strings at its top level that explain tools to the model are given to this
project's template of the family (`*.jinja` beside this file), which writes messages and calls.
"""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config.special_tokens import KINDS, read_json, special_token_texts
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.storage.mirror import SCRIPTS, local_folder
from jaxserve.text.messages import MessageForm, checked_tools, plain_field
from jaxserve.text.template import CheckedTemplate, TemplateError, TemplateRefusal

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", SCRIPTS)
"""Files in which templates are looked for; the first file that has one wins."""

SWITCHES = frozenset({"enable_thinking", "thinking", "reasoning_effort", "documents"})
"""Template variables that clients send to any model; other templates ignore them."""

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", *(f"{kind}_token" for kind in KINDS)}
)
"""Template variables that requests cannot set."""


class ChatTemplate:
    """The chat templates of one model, usually a single one. Safe for many threads.

    Attributes:
      special_tokens: `bos_token`, `eos_token`, ... → spelling.
      switches: the `chat_template_kwargs` that may be given.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        author: str = "model",
    ):
        """Parses templates.

        Args:
          sources: name → template; `default`, and perhaps `tool_use` for requests with tools.
          special_tokens: `bos_token`, `eos_token`, ... → spelling.
          author: "model" or "request": the origin of the templates; see `CheckedTemplate`.

        Raises:
          CheckpointError: templates cannot be parsed, or none is the default; lists all problems.
        """
        problems = [] if "default" in sources else ["there is no default one"]
        self.special_tokens = dict(special_tokens or {})
        self._templates: dict[str, CheckedTemplate] = {}
        self._forms: dict[str, MessageForm] = {}
        for name, source in sources.items():
            try:
                template = CheckedTemplate(source, author)
                self._forms[name] = MessageForm.of(template, self.special_tokens)
                self._templates[name] = template
            except TemplateError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise CheckpointError("chat template: " + "; ".join(problems))
        self._sources = dict(sources)
        read = frozenset().union(*(template.variables for template in self._templates.values()))
        self.switches = (SWITCHES | read) - RESERVED

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate | None":
        """Reads the templates of a model folder; None if it has no template.

        Raises:
          CheckpointError: a file is broken or a template cannot be parsed.
        """
        folder = local_folder(folder)
        problems: list[str] = []
        sources = _read_sources(folder, problems)
        names = read_json(folder / "tokenizer_config.json", problems)
        special_tokens = special_token_texts(folder, names, problems)
        if problems:
            unique = dict.fromkeys(problems)  # a file may be read twice
            raise CheckpointError(f"chat template of {folder}: " + "; ".join(unique))
        return cls(sources, special_tokens) if sources else None

    @property
    def source(self) -> str:
        """Source text of the default template."""
        return self._sources["default"]

    def mentions(self, text: str) -> bool:
        """Whether a template contains `text`. A marker in the template is known to the model."""
        return any(text in source for source in self._sources.values())

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        field: str = "messages",
    ) -> str:
        """The prompt of a conversation, with all of its special tokens, bos included.

        Args:
          messages: a list, checked here. Each message has `role` and `content` (a text, or parts of
            type "text"), and further fields that the template reads: `tool_calls`,
            `reasoning_content`, `tool_call_id`, `name`...
          tools: a list of functions that the model may call, as JSON schemas, or None.
          add_generation_prompt: whether the prompt ends where the model's answer begins.
          chat_template_kwargs: switches of the template, such as `enable_thinking`.
          continue_final_message: whether the prompt ends with the last message's content, without
            what the template writes after it.
          field: name of `messages` in errors.

        Raises:
          InvalidRequestError: names the field that is wrong or that the template refuses.
        """
        switches = self._checked_switches(chat_template_kwargs or {})
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        written = self._forms[name].written(messages, field)
        if continue_final_message:
            written = [*written[:-1], _marked(written[-1])]
        values = {
            **self.special_tokens,
            "messages": written,
            "tools": checked_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **switches,
        }
        try:
            text = self._templates[name].render(values)
        except TemplateRefusal as error:
            raise InvalidRequestError(field, f"the chat template refuses: {error}") from None
        except TemplateError as error:
            raise InvalidRequestError(field, f"the chat template failed: {error}") from None
        return _before_mark(text, field) if continue_final_message else text

    def _checked_switches(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in given:
            if name not in self.switches:
                known = ", ".join(sorted(self.switches))
                raise InvalidRequestError(
                    f"chat_template_kwargs.{name}", f"is no switch of the template; known: {known}"
                )
        return plain_field(given, "chat_template_kwargs")


MARK = "where the answer goes on "
"""Ends the content that is continued; its last space shows whether the template strips texts."""


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with `MARK` appended to its content."""
    content = message["content"]
    if isinstance(content, list):
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + MARK}]}
    return {**message, "content": content + MARK}


def _before_mark(text: str, field: str) -> str:
    """The text before the mark, stripped at its end if the template strips contents."""
    before, found, after = text.rpartition(MARK.strip())
    if not found:
        raise InvalidRequestError(
            "continue_final_message", f"the template does not write the content of {field}[-1]"
        )
    return before if after.startswith(MARK.removeprefix(MARK.strip())) else before.rstrip()


def _read_sources(folder: Path, problems: list[str]) -> dict[str, str]:
    """Returns name → template, from the first of FILES that has a template."""
    path = folder / FILES[0]
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
            return {}
    for name in FILES[1:-1]:
        found = read_json(folder / name, problems).get("chat_template")
        if found is not None:
            return _named_sources(found, name, problems)
    script = script_template(folder, problems)
    return {} if script is None else {"default": script}


def _named_sources(found: Any, file: str, problems: list[str]) -> dict[str, str]:
    """Normalises a field `chat_template` to name → template. It may be a single template,
    `[{"name": ..., "template": ...}]`, or `{name: template}`."""
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in found]
        found = {entry.get("name"): entry.get("template") for entry in entries}
    texts = isinstance(found, dict) and all(
        isinstance(part, str) for pair in found.items() for part in pair
    )
    if not texts:
        problems.append(f"chat_template of {file}: expected a text, or names and templates")
        return {}
    return found


_STRINGS = {
    "encoding_dsv32": {"tools_text": "TOOLS_SYSTEM_TEMPLATE"},
    "encoding_dsv4": {"tools_text": "TOOLS_TEMPLATE", "effort_text": "REASONING_EFFORT_MAX"},
}
"""Script → variable of our template → the script's name of the string."""
_FIELDS = {
    "dsml_token": "｜DSML｜",
    "thinking_start_token": "<think>",
    "thinking_end_token": "</think>",
    "tool_schemas": "{tool_schemas}",
}
"""Values of the fields in the script's strings; our template fills in the schemas."""


def script_template(folder: Path, problems: list[str]) -> str | None:
    """Returns the chat template for the script of a model folder; None if it has no known script.

    In mirrors and converted folders scripts lie in the folder itself.

    Appends to `problems` if the script cannot be read or lacks a string.
    """
    places = [folder / place / f"{stem}.py" for stem in _STRINGS for place in ("encoding", "")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        found = _strings(path.read_text(encoding="utf-8"))
        texts = {ours: found[name].format(**_FIELDS) for ours, name in _STRINGS[path.stem].items()}
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    except (LookupError, AttributeError) as error:
        problems.append(f"{path.name}: this string is missing, or this field is not known: {error}")
        return None
    own = Path(__file__).with_name(f"{path.stem}.jinja").read_text(encoding="utf-8")
    values = {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
    return "".join(f"{{% set {name} = {value} %}}" for name, value in values.items()) + own


def _strings(script: str) -> dict[str, str]:
    """Returns the strings that a script assigns to names at its top level."""
    found: dict[str, str] = {}
    for line in ast.parse(script).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {one.id: value.value for one in targets if isinstance(one, ast.Name)}
    return found

"""Checks the messages of clients and writes them in the form that a chat template reads.

Clients send what OpenAI's API documents: `content` null beside `tool_calls`, a call's arguments as
JSON text, contents in parts. Templates differ: some fail on null, others write calls only where
content is null; some iterate over arguments, others copy them. `MessageForm.of` determines a
template's form by rendering small conversations. Called by `chat.py`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.text.template import (
    CheckedTemplate,
    TemplateError,
    TemplateLimitError,
    TemplateRefusal,
    plain,
)

MAX_PARTS = 4096
"""Most parts in one message's content."""

ROLES = ("system", "user", "assistant", "tool")

_QUESTION = {"role": "user", "content": "Question?"}
_ARGUMENTS = {"probed_key": "probed value"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "other_function",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {"other": {"type": "string", "description": "What."}},
                "required": ["other"],
            },
        },
    }
]


class MessageForm(msgspec.Struct, frozen=True):
    """The form in which a template expects messages.

    Attributes:
      part_roles: roles whose contents the template reads as lists of parts; for other roles, parts
        are joined by line ends.
      empty_content: content of a message that has calls but no content.
      call_objects: whether a call's arguments are objects rather than JSON text.
      developer: whether the template knows the role `developer`; if not, it becomes `system`.
    """

    part_roles: frozenset[str]
    empty_content: str | None
    call_objects: bool
    developer: bool

    @classmethod
    def of(cls, template: CheckedTemplate, special_tokens: Mapping[str, str]) -> "MessageForm":
        """Determines the form that a template reads, by rendering small conversations."""
        roles = frozenset(role for role in ROLES if _reads_parts(template, special_tokens, role))
        empty, objects = _call_form(template, special_tokens)
        return cls(roles, empty, objects, "developer" in template.source)

    def written(self, messages: Any, field: str) -> list[dict[str, Any]]:
        """Checks the messages of a request and returns them in this form.

        Raises:
          InvalidRequestError: names the wrong part of `field`.
        """
        if not _list(messages, field):
            raise InvalidRequestError(field, "is empty")
        return [
            self._message(message, f"{field}[{index}]") for index, message in enumerate(messages)
        ]

    def _message(self, message: Any, place: str) -> dict[str, Any]:
        _check_message(_object(message, place), place)
        # Clients send back all fields of an answer, those without a value too.
        copy = {
            key: value for key, value in plain_field(message, place).items() if value or value == 0
        }
        copy["content"] = self._content(message.get("content"), copy["role"], f"{place}.content")
        calls = copy.get("tool_calls", [])
        for index, call in enumerate(calls):
            self._write_arguments(call, f"{place}.tool_calls[{index}].function")
        if calls and not copy["content"]:
            copy["content"] = self.empty_content
        if copy["role"] == "developer" and not self.developer:
            copy["role"] = "system"
        for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
            if isinstance(copy.get(name), str):
                copy.setdefault(other, copy[name])
        if not copy["content"] and "reasoning" in copy:
            copy.setdefault("thinking", copy["reasoning"])  # as gpt-oss's template calls it
        return copy

    def _content(self, content: Any, role: str, place: str) -> Any:
        if not isinstance(content, list | tuple):
            return content or ""
        texts = [_part_text(part, f"{place}[{index}]") for index, part in enumerate(content)]
        if role in self.part_roles:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _write_arguments(self, call: dict[str, Any], place: str) -> None:
        """Changes a call's arguments into the form that the template reads."""
        function = call.get("function")
        if not isinstance(function, dict):
            return
        arguments = function.get("arguments")
        if not self.call_objects and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        elif self.call_objects and (arguments is None or isinstance(arguments, str)):
            try:
                found = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise InvalidRequestError(f"{place}.arguments", "is no JSON object")
            function["arguments"] = found


def _render(
    template: CheckedTemplate,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
) -> str:
    """Renders messages; empty if the template cannot. Raises TemplateLimitError."""
    values = {**special_tokens, "messages": messages, "tools": tools, "documents": None}
    try:
        return template.render(values)
    except TemplateLimitError:
        raise  # each conversation would take as long
    except (TemplateError, TemplateRefusal):
        return ""


def _reads_parts(template: CheckedTemplate, special_tokens: Mapping[str, str], role: str) -> bool:
    """Whether the template writes the texts of parts, and not the list itself."""
    parts = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]
    message = {"role": role, "content": parts, "tool_call_id": "probed000", "name": "f"}
    before = {"system": [], "user": []}.get(role, [_QUESTION])
    after = [_QUESTION] if role == "system" else []
    text = _render(template, special_tokens, [*before, message, *after])
    return all(part["text"] in text for part in parts) and not any(
        mark in text for mark in ("'type'", '"type"', '\\"type')
    )


def _call_form(
    template: CheckedTemplate, special_tokens: Mapping[str, str]
) -> tuple[str | None, bool]:
    """Returns `empty_content` and `call_objects` of a template's `MessageForm`."""
    if "tool_calls" not in template.source:
        return "", True
    as_text = json.dumps(_ARGUMENTS)
    for empty in ("", None):
        texts = {
            objects: _render(
                template,
                special_tokens,
                _call_messages(empty, _ARGUMENTS if objects else as_text),
                _TOOLS,
            )
            for objects in (True, False)
        }
        if _has_call(texts[True]) and texts[True] != texts[False]:
            return empty, True
        if _has_call(texts[False]):
            return empty, False  # the text that the model wrote, letter by letter
    return "", True


def _call_messages(content: str | None, arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "probed_function", "arguments": arguments}
    call = {"id": "probed000", "type": "function", "function": function}
    answer = {"role": "tool", "content": "12", "tool_call_id": "probed000"}
    return [
        _QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {**answer, "name": "probed_function"},
    ]


def _has_call(text: str) -> bool:
    """Whether a text has the whole call, with arguments in JSON: not encoded twice, not Python."""
    has = all(part in text for part in ("probed_function", "probed_key", "probed value"))
    return has and not any(wrong in text for wrong in ('\\"probed_key', "'probed_key'"))


def plain_field(value: Any, name: str) -> Any:
    """Copies a value for the template. Errors name its wrong part; `name` is the value's name."""
    try:
        return plain(value, name=name)
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        raise InvalidRequestError(field, message) from None


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A copy of the tools of a request; raises InvalidRequestError."""
    if tools is None:
        return None
    for index, tool in enumerate(_list(tools, "tools")):
        place = f"tools[{index}]"
        if (function := _object(tool, place).get("function")) is not None:
            _object(function, f"{place}.function")
    return plain_field(tools, "tools")


def _check_message(message: Mapping[str, Any], place: str) -> None:
    """Raises for a message that no template can read."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        wrong = "is missing" if role is None else f"expected a text, got {role!r}"
        raise InvalidRequestError(f"{place}.role", wrong)
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequestError(f"{place}.content", "is missing")
    if content is None or isinstance(content, str):
        content = ()
    if len(_list(content, f"{place}.content", "a text or a list")) > MAX_PARTS:
        raise InvalidRequestError(
            f"{place}.content", f"{len(content)} parts, at most {MAX_PARTS} are allowed"
        )
    calls = message.get("tool_calls")
    for index, call in enumerate(() if calls is None else _list(calls, f"{place}.tool_calls")):
        _object(call, f"{place}.tool_calls[{index}]")


def _list(value: Any, place: str, what: str = "a list") -> Sequence[Any]:
    """The value, if it is a list; raises InvalidRequestError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(place, f"expected {what}, got {type(value).__name__}")
    return value


def _object(value: Any, place: str) -> Mapping[str, Any]:
    """The value, if it is an object; raises InvalidRequestError."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(place, f"expected an object, got {type(value).__name__}")
    return value


def _part_text(part: Any, place: str) -> str:
    """The text of one part of a message's content."""
    kind = _object(part, place).get("type")
    if kind != "text":
        raise InvalidRequestError(f"{place}.type", f"{kind!r} is not supported: only 'text' is")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{place}.text", "expected a text")
    return part["text"]

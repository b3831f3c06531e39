"""Formats of tool calls by model family: markers, readers, and grammars that force a call.

A `CallFormat` is data. Its reader (`call_readers.py`) takes the text between two markers piece by
piece, and returns parts of calls: a name first, then pieces of the arguments. Called by
`answers.py` and, for grammars, by `server/http/forms.py`.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.text.call_readers import (
    JSON_NAME,
    CallReader,
    JsonReader,
    MarkedReader,
    Tags,
    Types,
    XmlReader,
    is_text,
    whole_json,
)
from jaxserve.text.structured import quoted


class CallFormat(msgspec.Struct, frozen=True):
    """How a model family writes tool calls.

    Attributes:
      begin, end: the markers around calls.
      reader: makes a reader of the text between the markers from the functions' parameters.
      known_by: texts in the chat template by which such a model is recognised.
      around: the text before and after the arguments of a call, between the markers; a format of
        the function's `name`, the name `quoted`, and the `number` of calls before.
      parameter: the text around a parameter's value, where each has an element of its own; a format
        of its `key`, and `string`, which is true for a text and false for JSON.
    """

    begin: str
    end: str
    reader: Callable[[Types], CallReader]
    known_by: tuple[str, ...]
    around: tuple[str, str]
    parameter: tuple[str, str] | None = None

    def behind(self, text: str) -> str:
        """The text after a call's arguments without what belongs to the call."""
        text, tail = text.strip(), self.around[1].strip()
        return next(text[n:] for n in range(len(tail), -1, -1) if tail.endswith(text[:n])).strip()

    def rules(self, name: str, number: int, schema: Any, index: int) -> list[str]:
        """Rules of a Lark grammar for a call; the first is the call, `call{index}`.

        Args:
          name: name of the function.
          number: number of calls that the conversation already has.
          schema: JSON schema of the parameters.
          index: makes the names of the rules unique.

        Raises:
          ValueError: the name cannot be written in this format.
        """
        before, after = self.around
        before = before.format(name=name, quoted=quoted(name), number=number)
        parts = self.reader({}).read(f"{before}{{}}{after}", last=True)
        if not parts or parts[0].name != name:
            raise ValueError(f"{name!r} cannot be written in this model's calls")
        head, ends = f"call{index}: {quoted(before)}", f" {quoted(after)}" if after else ""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if self.parameter is None or not isinstance(properties, dict):
            inner = f" arguments{index}" if self.parameter is None else ""
            rules = [] if self.parameter else [f"arguments{index}: %json {json.dumps(schema)}"]
            return [f"{head}{inner}{ends}", *rules]
        required, rules, uses = schema.get("required") or [], [], []
        shared = {
            key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema
        }
        end = re.escape(self.end).replace("/", r"\/")
        for place, (key, part) in enumerate(properties.items()):
            rule = f"value{index}_{place}"
            opening, closing = self.parameter
            opening = opening.format(key=key, string=str(is_text(part)).lower())
            uses.append(f" {rule}" if key in required else f" {rule}?")
            if is_text(part):
                choices = part.get("enum") if isinstance(part, dict) else None
                if choices and isinstance(choices, list):
                    text = " | ".join(quoted(f"{choice}{closing}") for choice in choices)
                    rules.append(f"{rule}: {quoted(opening)} ({text})")
                else:
                    rules.append(f"{rule}: {quoted(opening)} text{index}_{place}")
                    text = f"text{index}_{place}[suffix={quoted(closing)}]"
                    rules.append(f"{text}: /(?s:.*)/ & ~/(?s:.*){end}(?s:.*)/")
            else:
                rules.append(f"{rule}: {quoted(opening)} json{index}_{place} {quoted(closing)}")
                own = {**shared, **({} if part is True else part)}
                rules.append(f"json{index}_{place}: %json {json.dumps(own)}")
        return [head + "".join(uses) + ends, *rules]


def types_of(tools: Sequence[Mapping[str, Any]] | None) -> Types:
    """The parameters' schemas of every function."""
    types = {}
    for tool in tools or ():
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            types[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return types


_JSON = re.compile(JSON_NAME.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>[^<]*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?=.)", re.DOTALL
)
_DEEPSEEK_V31 = re.compile(r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>")
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>"
)
_STEP = re.compile(r"\s*function\n(?P<name>[^\n]+)\n\s*(?=\{)")
_HARMONY = re.compile(r"(?P<name>[^\s<]+)[^<]*<\|constrain\|>json<\|message\|>(?=\{)")
_QWEN_TAGS = Tags(
    re.compile(r"<function=(?P<name>[^>\n]+)>"),
    re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?|</function>"),
    # Some models forget the end tag.
    re.compile(r"\n?(?:</parameter>|(?=<parameter=[^>\n]+>)|(?=</function>))"),
)
_GLM_TAGS = Tags(
    re.compile(r"\A\s*(?P<name>[^\s<]+)(?=\n|<arg_key>)"),
    re.compile(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>\n?"),
    re.compile(r"</arg_value>"),
)


def _invoke_tags(prefix: str, begun: str = r">\n?") -> Tags:
    """Elements `invoke` and `parameter` with a prefix, whose names are attributes; `begun` is the
    pattern of the rest of a parameter's beginning, behind its name."""
    return Tags(
        re.compile(rf'<{prefix}invoke name="(?P<name>[^"]+)">'),
        re.compile(rf'<{prefix}parameter name="(?P<key>[^"]+)"{begun}|</{prefix}invoke>'),
        re.compile(rf"</{prefix}parameter>"),
    )


JSON = CallFormat(
    "<tool_call>",
    "</tool_call>",
    lambda types: JsonReader(_JSON, True, whole_json),
    ("<tool_call>",),
    ('\n{{"name": {quoted}, "arguments": ', "}\n"),
)
QWEN_XML = CallFormat(
    "<tool_call>",
    "</tool_call>",
    functools.partial(XmlReader, _QWEN_TAGS),
    ("<tool_call>", "<function="),
    ("\n<function={name}>\n", "</function>\n"),
    ("<parameter={key}>\n", "\n</parameter>\n"),
)
DEEPSEEK = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    lambda types: MarkedReader(_DEEPSEEK, "\n```<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>", "```json"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
)
DEEPSEEK_V31 = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    lambda types: MarkedReader(_DEEPSEEK_V31, "<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
KIMI = CallFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    lambda types: MarkedReader(_KIMI, "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>",),
    (
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
STEPTML = CallFormat(
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    functools.partial(XmlReader, _invoke_tags("steptml:")),
    ("<｜tool_calls_begin｜>",),
    (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    ('<steptml:parameter name="{key}">', "</steptml:parameter>\n"),
)
STEP = CallFormat(
    "<|CALL_START|>",
    "<|CALL_END|>",
    lambda types: JsonReader(_STEP, False),
    ("<|CALL_START|>",),
    ("function\n{name}\n", ""),
)
GLM = CallFormat(
    "<tool_call>",
    "</tool_call>",
    functools.partial(XmlReader, _GLM_TAGS),
    ("<tool_call>", "<arg_key>"),
    ("{name}\n", ""),
    ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
)
MINIMAX = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    functools.partial(XmlReader, _invoke_tags("")),
    ("<minimax:tool_call>",),
    ('\n<invoke name="{name}">\n', "</invoke>\n"),
    ('<parameter name="{key}">', "</parameter>\n"),
)
_DSML_TAGS = _invoke_tags("｜DSML｜", r'(?: string="(?P<string>true|false)")?>')
DEEPSEEK_V32, DEEPSEEK_V4 = (
    CallFormat(
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        functools.partial(XmlReader, _DSML_TAGS),
        (f"<｜DSML｜{block}>",),
        ('\n<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n"),
        ('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n"),
    )
    for block in ("function_calls", "tool_calls")
)
HARMONY = CallFormat(
    "<|channel|>commentary to=functions.",
    "",
    lambda types: JsonReader(_HARMONY, False),
    ("<|channel|>", "<|message|>"),
    ("{name} <|constrain|>json<|message|>", ""),
)
"""Forced calls of gpt-oss; `answer_format.py` reads its answers."""

CALL_FORMATS = (
    *(HARMONY, QWEN_XML, GLM, MINIMAX, JSON),
    *(DEEPSEEK, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4),
    *(KIMI, STEPTML, STEP),
)
"""The known formats; a model has the first one that its template shows."""

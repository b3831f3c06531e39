"""Parses the output of chat models into reasoning, content and tool calls.

Models write all three into one text, between markers that differ by family; the chat template
writes the same markers, which tells the ones that a model knows. The parser is incremental: pieces
are returned as soon as they are certain, a tool call only when complete. Called by `http/chat.py`;
knows no network.
"""

import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator

import msgspec

from jaxserve.text.chat import ChatTemplate

THINK, END_THINK = "<think>", "</think>"
MAX_CALLS = 128
"""Tool calls of one answer; any further ones stay text."""
MAX_SECTION_CHARACTERS = 2**20
"""A longer section of tool calls is taken for text."""


class Call(msgspec.Struct, frozen=True):
    """A tool call; `arguments` is what the model wrote, usually JSON."""

    name: str
    arguments: str
    id: str


class Piece(msgspec.Struct, frozen=True):
    """A delta of an answer: exactly one of the three is set."""

    reasoning: str = ""
    content: str = ""
    call: Call | None = None


class CallFormat(msgspec.Struct, frozen=True):
    """How a model family writes tool calls: between two markers, in a format of its own."""

    begin: str
    end: str
    read: Callable[[str], list[Call] | None]
    """Parses the text between the markers; None if it does not have this format."""
    around: Callable[[str, int], tuple[str, str]]
    """The text before and after the arguments of a call, between the markers; takes the function's
    name and the number of calls that the conversation already has."""


class AnswerFormat(msgspec.Struct, frozen=True):
    """The markers that a model knows."""

    thinks: bool
    calls: CallFormat | None

    @classmethod
    def of(cls, template: ChatTemplate) -> "AnswerFormat":
        """The markers that the model's template writes."""
        calls = next((known for known in CALL_FORMATS if template.mentions(known.begin)), None)
        return cls(template.mentions(THINK) or template.mentions(END_THINK), calls)

    def parser(self, prompt: str, *, tools: bool) -> "AnswerParser":
        """A parser for one answer.

        Args:
          prompt: the text that the answer continues; its end may have begun the reasoning.
          tools: whether to look for tool calls.
        """
        return AnswerParser(self.thinks, self.thinking(prompt), self.calls if tools else None)

    def thinking(self, prompt: str) -> bool:
        """Whether the prompt ends inside the reasoning."""
        return self.thinks and prompt.rstrip().endswith(THINK)


State = Callable[[str, bool], tuple[list["Piece"], str | None]]
"""Takes text and whether it is the last; returns pieces, and the text for the next state if any."""


class AnswerParser:
    """Parses one answer. Made by `AnswerFormat.parser`."""

    def __init__(self, thinks: bool, thinking: bool, calls: CallFormat | None):
        self._calls = calls
        self._called = 0
        self._state: State = self._content
        if thinks:
            self._state = self._reasoning if thinking else self._beginning
        self._held = ""  # text that may be the beginning of a marker
        self._newlines = ""  # at the end of the reasoning so far; dropped if it ends here
        self._body = ""  # of a section of tool calls
        self._said = False  # whether the current part has any text yet

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""
        return self._called > 0

    def push(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that are certain now, adjacent ones of a kind joined."""
        return _joined(self._pieces(text, last=False))

    def finish(self) -> list[Piece]:
        """Ends the text; returns the remaining pieces."""
        return _joined(self._pieces("", last=True))

    def _pieces(self, text: str, last: bool) -> Iterator[Piece]:
        rest: str | None = text
        while rest is not None:
            pieces, rest = self._state(rest, last)
            yield from pieces

    def _beginning(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Only white space so far: the answer may begin with reasoning."""
        text, self._held = self._held + text, ""
        begun = text.lstrip()
        if begun.startswith(THINK):
            self._state = self._reasoning
            return [], begun.removeprefix(THINK)
        if THINK.startswith(begun) and not last:
            self._held = text
            return [], None
        self._state = self._content
        return [], text

    def _reasoning(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Inside the reasoning; newlines around it are not part of it."""
        out, rest = self._until(END_THINK, text, last)
        out = self._first_line(self._newlines + out)
        kept = out.rstrip("\n")
        self._newlines = out[len(kept) :]
        if rest is not None:
            self._state, self._newlines, self._said = self._content, "", False
        return [Piece(reasoning=kept)] if kept else [], rest

    def _content(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Inside the content, up to a tool call."""
        if self._calls is None:
            out, rest = text, None
        else:
            out, rest = self._until(self._calls.begin, text, last)
        out = self._first_line(out)
        if rest is not None:
            self._state = self._section
        return [Piece(content=out)] if out else [], rest

    def _section(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Between the markers of tool calls; text that does not have their format is content."""
        assert self._calls is not None
        out, rest = self._until(self._calls.end, text, last)
        self._body += out
        too_long = len(self._body) > MAX_SECTION_CHARACTERS
        if rest is None and not last and not too_long:
            return [], None
        body, self._body, self._state = self._body, "", self._content
        calls = None if too_long else self._calls.read(body)
        if calls and self._called + len(calls) <= MAX_CALLS:
            self._called += len(calls)
            self._said = False
            return [Piece(call=call) for call in calls], rest
        written = self._calls.begin + body + (self._calls.end if rest is not None else "")
        self._said = True
        return [Piece(content=written)], rest

    def _first_line(self, text: str) -> str:
        """The text, without the newlines at the beginning of a part."""
        if not self._said:
            text = text.lstrip("\n")
            self._said = bool(text)
        return text

    def _until(self, mark: str, text: str, last: bool) -> tuple[str, str | None]:
        """The text before a marker, and the text after it, or None if there is none yet."""
        text, self._held = self._held + text, ""
        before, found, after = text.partition(mark)
        if found:
            return before, after
        if not last:
            longest = min(len(mark) - 1, len(text))
            held = next(n for n in range(longest, -1, -1) if mark.startswith(text[len(text) - n :]))
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text, None


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Joins adjacent texts of the same kind."""
    joined: list[Piece] = []
    for kind, group in itertools.groupby(pieces, _kind):
        if kind == "call":
            joined += group
        elif kind == "reasoning":
            joined.append(Piece(reasoning="".join(piece.reasoning for piece in group)))
        else:
            joined.append(Piece(content="".join(piece.content for piece in group)))
    return joined


def _kind(piece: Piece) -> str:
    if piece.call is not None:
        return "call"
    return "reasoning" if piece.reasoning else "content"


def _call(name: str, arguments: str, call_id: str | None = None) -> Call:
    return Call(name, arguments, call_id or f"call_{uuid.uuid4().hex[:24]}")


def _read_json(body: str) -> list[Call] | None:
    """`{"name": …, "arguments": {…}}` (Qwen, Hermes)."""
    try:
        found = json.loads(body)
        arguments = found["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return [_call(found["name"], arguments)] if isinstance(found["name"], str) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>[^<]*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n```"
    r"<｜tool▁call▁end｜>",
    re.DOTALL,
)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_STEP = re.compile(r"\s*function\n(?P<name>[^\n]+)\n")


def _read_deepseek(body: str) -> list[Call] | None:
    """Each call between markers of its own, the arguments as a code block."""
    return [_call(found["name"].strip(), found["arguments"]) for found in _DEEPSEEK.finditer(body)]


def _read_kimi(body: str) -> list[Call] | None:
    """Each call with an id: the function's name and the call's number in the conversation."""
    return [
        _call(found["name"], found["arguments"].strip(), found["id"])
        for found in _KIMI.finditer(body)
    ]


def _read_step(body: str) -> list[Call] | None:
    """`function`, the name and the arguments on a line each, for every call."""
    calls, place = [], 0
    decoder = json.JSONDecoder()
    while found := _STEP.match(body, place):
        try:
            _, place = decoder.raw_decode(body, found.end())
        except (ValueError, RecursionError):
            return None
        calls.append(_call(found["name"].strip(), body[found.end() : place]))
    return calls if not body[place:].strip() else None


def _around_json(name: str, number: int) -> tuple[str, str]:
    return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}\n"


def _around_deepseek(name: str, number: int) -> tuple[str, str]:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return begin, "\n```<｜tool▁call▁end｜>"


def _around_kimi(name: str, number: int) -> tuple[str, str]:
    begin = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return begin, "<|tool_call_end|>"


def _around_step(name: str, number: int) -> tuple[str, str]:
    return f"function\n{name}\n", ""


CALL_FORMATS = (
    CallFormat("<tool_call>", "</tool_call>", _read_json, _around_json),
    CallFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _read_deepseek, _around_deepseek),
    CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _read_kimi, _around_kimi
    ),
    CallFormat("<|CALL_START|>", "<|CALL_END|>", _read_step, _around_step),
)
"""The known formats; a model has the one whose first marker its template writes."""

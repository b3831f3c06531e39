"""The form in which a model writes reasoning, content and tool calls, as its template shows it.

gpt-oss answers in harmony, messages each with a channel:

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

A message to a function is a call. Others are reasoning on the channel `analysis`, and content on
`commentary` and `final`. Called by the handlers of chats; knows no network.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.text.answers import END_THINK, MAX_CALLS, THINK, AnswerParser, Piece
from jaxserve.text.call_readers import CallPart, new_id
from jaxserve.text.calls import CALL_FORMATS, HARMONY, CallFormat
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import unfinished

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
REASONING = f"{CHANNEL}analysis{MESSAGE}", "<|end|>"

_HEADS = "<|start|>", CHANNEL, MESSAGE, "<|constrain|>", "to="
"""Beginnings of a message's head. An answer that begins with another text has no messages."""
_ENDS = "<|end|>", "<|call|>", "<|return|>", "<|start|>"
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")


class HarmonyParser(AnswerParser):
    """Parses one answer; see `AnswerParser`.

    Args:
      tools: functions that may be called; None: calls are treated as content.
      max_calls: most calls of the answer; further calls are dropped.
      begun: whether the answer goes on inside a content.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None, max_calls: int, *, begun: bool = False
    ):
        super().__init__(False, False, None, tools, max_calls, begun)
        self._tools = tools is not None
        self._kind = "content"  # of the current message: content, reasoning, call or dropped
        self._before = {"content"} if begun else set[str]()  # kinds that earlier messages had
        self._first = not begun  # no message has begun yet
        self._state = self._inside if begun else self._outside

    def _outside(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Before a message: its recipient and channel."""
        text, self.held = self.held + text, ""
        head, found, after = text.partition(MESSAGE)
        begun = (head + found).lstrip()
        known = any(begun.startswith(mark) or mark.startswith(begun) for mark in _HEADS)
        if self._first and not known:
            self._state = self._inside
            return [], text
        if found:
            self._state, self._first, self._said = self._inside, False, False
            return self._open(head), after
        self.held = "" if last else text
        return [], None

    def _open(self, head: str) -> list[Piece]:
        recipient = _RECIPIENT.search(head)
        if recipient is None or not self._tools:
            self._kind = "reasoning" if _ANALYSIS.search(head) else "content"
            return []
        self._called += 1
        self._kind = "call" if self._called <= self._max_calls else "dropped"
        name, number = recipient[1], self._called - 1
        part = CallPart(number=number, name=name, id=new_id())
        return [Piece(call=part)] if self._kind == "call" else []

    def _inside(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Inside a message."""
        text, self.held = self.held + text, ""
        end, rest = _END.search(text), None
        if end:
            text, rest = text[: end.start()], text[end.end() :]
            self._state = self._outside
        elif not last or self._cut:
            held = max(unfinished(mark, text) for mark in _ENDS)
            text, self.held = text[: len(text) - held], text[len(text) - held :]
        kind, first = self._kind, not self._said
        self._said |= bool(text)
        if kind == "call":
            text = "{}" if end and not self._said else text  # a function without parameters
            part = CallPart(number=self._called - 1, arguments=text)
            return [Piece(call=part)] if text else [], rest
        if not text or kind == "dropped":
            return [], rest
        if first and kind in self._before:
            text = f"\n{text}"
        self._before.add(kind)
        return [Piece(reasoning=text) if kind == "reasoning" else Piece(content=text)], rest


class AnswerMarkers(msgspec.Struct, frozen=True):
    """The markers that a model knows."""

    thinks: bool
    calls: CallFormat | None

    @classmethod
    def of(cls, template: ChatTemplate) -> "AnswerMarkers":
        """The markers that the model's template writes."""
        calls = next(
            (known for known in CALL_FORMATS if all(map(template.mentions, known.known_by))), None
        )
        return cls(template.mentions(THINK) or template.mentions(END_THINK), calls)

    @property
    def _harmony(self) -> bool:
        return self.calls is HARMONY

    def parser(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        max_calls: int = MAX_CALLS,
        continued: str = "",
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
          prompt: the text that the answer continues; its end may have begun the reasoning.
          tools: functions that may be called; None: calls are treated as text.
          max_calls: most calls of the answer; further calls are dropped.
          continued: the beginning of the answer, with which the prompt ends.
        """
        if self._harmony:
            return HarmonyParser(tools, max_calls, begun=continued != "")
        calls = None if tools is None else self.calls
        thinking = self.thinking(prompt, continued)
        begun = continued != "" and not continued.rstrip().endswith((THINK, END_THINK))
        return AnswerParser(self.thinks, thinking, calls, tools, max_calls, begun)

    def thinking(self, prompt: str, continued: str = "") -> bool:
        """Whether the prompt, or the answer that it begins, ends inside the reasoning."""
        inside = continued.rfind(THINK) > continued.rfind(END_THINK)
        return self.thinks and (inside or prompt.rstrip().endswith(THINK))

    def reasoning(self, prompt: str, continued: str = "") -> tuple[str, str] | None:
        """The marks around the reasoning, the first one empty if the prompt ends inside it; None:
        the model has none."""
        if self._harmony:
            return REASONING
        if not self.thinks:
            return None
        return "" if self.thinking(prompt, continued) else THINK, END_THINK

    def before_content(self, prompt: str, continued: str = "") -> str:
        """The mark behind which the content begins; empty: the answer begins with it."""
        if self._harmony:
            return "" if continued else FINAL
        return END_THINK if self.thinking(prompt, continued) else ""

    def before_call(self, prompt: str, continued: str = "") -> str:
        """The mark behind which a call may begin; empty: the answer may begin with it."""
        return "" if self._harmony else self.before_content(prompt, continued)

    def spelt(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Markers that the parser looks for, whose tokens need a text; empty: none."""
        if self._harmony:
            return FINAL
        return self.calls.begin if self.calls and tools is not None else ""

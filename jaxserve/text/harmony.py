"""Parses answers in harmony, the form of gpt-oss: messages, each with a channel.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary
    to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

A message to a function is a call. Others are reasoning on the channel `analysis`, and content on
`commentary` and `final`. Called by `answer_format.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.answers import AnswerParser, Piece
from jaxserve.text.call_readers import CallPart, new_id
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

"""The form in which a model writes reasoning, content and tool calls, as its template shows it.

Called by the handlers of chats; knows no network.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.text import harmony
from jaxserve.text.answers import END_THINK, MAX_CALLS, THINK, AnswerParser
from jaxserve.text.calls import CALL_FORMATS, HARMONY, CallFormat
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.harmony import HarmonyParser


class AnswerFormat(msgspec.Struct, frozen=True):
    """The markers that a model knows."""

    thinks: bool
    calls: CallFormat | None

    @classmethod
    def of(cls, template: ChatTemplate) -> "AnswerFormat":
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
            return harmony.REASONING
        if not self.thinks:
            return None
        return "" if self.thinking(prompt, continued) else THINK, END_THINK

    def before_content(self, prompt: str, continued: str = "") -> str:
        """The mark behind which the content begins; empty: the answer begins with it."""
        if self._harmony:
            return "" if continued else harmony.FINAL
        return END_THINK if self.thinking(prompt, continued) else ""

    def before_call(self, prompt: str, continued: str = "") -> str:
        """The mark behind which a call may begin; empty: the answer may begin with it."""
        return "" if self._harmony else self.before_content(prompt, continued)

    def spelt(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Markers that the parser looks for, whose tokens need a text; empty: none."""
        if self._harmony:
            return harmony.FINAL
        return self.calls.begin if self.calls and tools is not None else ""

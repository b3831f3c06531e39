"""Parses the output of chat models into reasoning, content and tool calls.

Models write all three into one text, between markers that differ by family; the chat template
writes the same markers, which tells the ones that a model knows (`calls.py`). The parser is
incremental: pieces are returned as soon as they are certain, a call's arguments too. Called by the
handlers of chats; knows no network.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.text.call_readers import CallPart, CallReader
from jaxserve.text.calls import CallFormat, types_of
from jaxserve.text.tokenizer import unfinished

THINK, END_THINK = "<think>", "</think>"
MAX_CALLS = 128
"""Most tool calls of one answer; further calls are dropped."""
MAX_HEAD_CHARACTERS = 256
"""Most characters of a call before its arguments. If an answer is cut off between the markers of
calls, a shorter text at its end is taken for the beginning of a call and dropped."""
MAX_SECTION_CHARACTERS = 2**16
"""Longer text between the markers of calls that does not begin a call is treated as content."""


class Piece(msgspec.Struct, frozen=True):
    """A delta of an answer: exactly one of the three is set."""

    reasoning: str = ""
    content: str = ""
    call: CallPart | None = None


ParserState = Callable[[str, bool], tuple[list["Piece"], str | None]]
"""Takes text and whether it is the last; returns pieces, and the text for the next state if any."""


class AnswerParser:
    """Parses one answer. Made by `AnswerMarkers.parser` (`answer_format.py`).

    Attributes:
      held: the end of the text, while it may be the beginning of a marker.
    """

    def __init__(
        self,
        thinks: bool,
        thinking: bool,
        calls: CallFormat | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_calls: int = MAX_CALLS,
        begun: bool = False,
    ):
        self._calls = calls
        self._types = types_of(tools)
        self._max_calls = max_calls
        self._called = 0
        self._state: ParserState = self._beginning if thinks and not begun else self._content
        if thinks and thinking:
            self._state = self._reasoning
        self.held = ""  # text that may be the beginning of a marker
        self._newlines = ""  # at the end of the reasoning so far; dropped if it ends here
        self._reader: CallReader | None = None  # of the current section of calls
        self._body = ""  # of a section in which no call has begun yet
        self._said = begun  # whether the current part has any text yet
        self._cut = False

    @property
    def called(self) -> bool:
        """Whether a tool call was found."""
        return self._called > 0

    def push(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that are certain now, adjacent ones of a kind joined."""
        return joined(self._pieces(text, last=False))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Ends the text, which was `cut` off or is complete; returns the remaining pieces."""
        self._cut = cut
        return joined(self._pieces("", last=True))

    def _pieces(self, text: str, last: bool) -> Iterator[Piece]:
        rest: str | None = text
        while rest is not None:
            pieces, rest = self._state(rest, last)
            yield from pieces

    def _beginning(self, text: str, last: bool) -> tuple[list[Piece], str | None]:
        """Only white space so far: the answer may begin with reasoning."""
        text, self.held = self.held + text, ""
        begun = text.lstrip()
        if begun.startswith(THINK):
            self._state = self._reasoning
            return [], begun.removeprefix(THINK)
        if THINK.startswith(begun) and not last:
            self.held = text
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
        if self._reader is None:
            self._reader = self._calls.reader(self._types)
        end = self._calls.end
        out, rest = self._until(end, text, last)
        parts = self._reader.read(out)
        ends, cut = rest is not None or last, last and rest is None and self._cut
        hidden = MAX_HEAD_CHARACTERS if cut else 0
        if rest is not None and self._reader.within:
            parts += self._reader.read(end)
            out, end, ends = out + end, "", False
        elif ends:
            if rest is None and not cut:
                rest = self._reader.after(end)
            parts += self._reader.read("", last=True, cut=cut)
        pieces = list(self._called_pieces(parts))
        if self._reader.begun:
            self._body = ""
        else:
            self._body += out
            if len(self._body) > MAX_SECTION_CHARACTERS or (ends and len(self._body) > hidden):
                body = self._calls.begin + self._body
                body += end if rest is not None else ""
                pieces, ends, self._said = [Piece(content=body)], True, True
                rest = "" if rest is None and not last else rest
                self._reader, self._body, self._state = None, "", self._content
                return pieces, rest
        if ends:
            left = self._calls.behind(self._reader.left) if rest is None else ""
            pieces += [Piece(content=left)] if len(left) > hidden else []
            self._reader, self._body, self._state = None, "", self._content
            self._said = False
        return pieces, rest

    def _called_pieces(self, parts: Iterable[CallPart]) -> Iterator[Piece]:
        """Pieces of the calls that the answer may have."""
        for part in parts:
            self._called += bool(part.id)
            if self._called <= self._max_calls:
                part = msgspec.structs.replace(part, number=self._called - 1)
                yield Piece(call=part)

    def _first_line(self, text: str) -> str:
        """The text, without the newlines at the beginning of a part."""
        if not self._said:
            text = text.lstrip("\n")
            self._said = bool(text)
        return text

    def _until(self, mark: str, text: str, last: bool) -> tuple[str, str | None]:
        """The text before a marker, and the text after it; None if the marker has not appeared."""
        text, self.held = self.held + text, ""
        before, found, after = text.partition(mark)
        if found:
            return before, after
        if not last:
            held = unfinished(mark, text)
            text, self.held = text[: len(text) - held], text[len(text) - held :]
        return text, None


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Joins adjacent pieces of the same kind, and of the same call."""
    longer: list[Piece] = []
    for kind, several in itertools.groupby(pieces, kind_of):
        group = list(several)
        if isinstance(kind, str):
            said: Any = {kind: "".join(getattr(piece, kind) for piece in group)}
            longer.append(Piece(**said))
        else:
            parts = [piece.call for piece in group if piece.call is not None]
            arguments = "".join(part.arguments for part in parts)
            longer.append(Piece(call=msgspec.structs.replace(parts[0], arguments=arguments)))
    return longer


def kind_of(piece: Piece) -> str | int:
    """ "reasoning", "content" or the number of the call."""
    if piece.call is not None:
        return piece.call.number
    return "reasoning" if piece.reasoning else "content"

"""Incremental readers of tool calls: each takes a text piece by piece and returns parts of calls.

Called by the formats of `calls.py`, of which each makes the reader of its family.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxserve.text.structured import quoted
from jaxserve.text.tokenizer import unfinished

Types = Mapping[str, Mapping[str, Any]]
"""Function → its parameters' schemas, by name."""


class CallPart(msgspec.Struct, frozen=True):
    """A further part of a tool call.

    Attributes:
      number: place of the call in the answer.
      name, id: name and id of the call; set in its first part only.
      arguments: further text of the arguments, usually JSON.
    """

    number: int = 0
    name: str = ""
    id: str = ""
    arguments: str = ""


class CallReader:
    """Reads the calls between two markers; a section between markers has a reader of its own.

    Attributes:
      begun: whether a call was found.
    """

    def __init__(self) -> None:
        self.begun = False
        self._text = ""  # not yet understood
        self._inside = False  # of a call
        self._depth = 0  # of the arguments' JSON, as far as it was scanned
        self._in_string = self._escaped = self._broken = False

    @property
    def within(self) -> bool:
        """Whether the text so far ends inside a value, where the end marker is text like any other.

        A JSON string with a line break in it is broken, and may have lost its end: markers count.
        """
        return self._inside and self._quoted and "\n" not in self._text

    @property
    def _quoted(self) -> bool:
        return self._in_string and not self._broken

    def read(self, text: str, last: bool = False, cut: bool = False) -> list[CallPart]:
        """Takes text; returns the parts that are certain now.

        Args:
          last: nothing follows.
          cut: nothing follows because the answer was cut off.
        """
        self._text += text
        parts = []
        while (part := self._inner() if self._inside else self._begin()) is not None:
            parts.append(part)
        return parts + (self._end(cut) if last else [])

    @property
    def left(self) -> str:
        """The text after the last call."""
        return "" if self._inside else self._text

    def after(self, mark: str) -> str | None:
        """Gives the text back that follows a mark inside a value which never ended."""
        before, found, after = self._text.partition(mark)
        if not (self._inside and found):
            return None
        self._text = before
        return after

    def _begin(self) -> CallPart | None:
        """The beginning of the next call; None if it is not complete yet."""
        raise NotImplementedError

    def _inner(self) -> CallPart | None:
        """The next part of the arguments; None if no further part is certain yet."""
        raise NotImplementedError

    def _end(self, cut: bool) -> list[CallPart]:
        """Returns the parts that only the end of the text shows."""
        return []

    def _named(self, found: re.Match[str], name: str) -> CallPart:
        """The first part of a call, whose beginning was found."""
        self._text = self._text[found.end() :]
        self._inside = self.begun = True
        self._depth = 0
        self._in_string = self._escaped = self._broken = False
        return CallPart(name=name, id=found.groupdict().get("id") or new_id())

    def _scan(self, text: str) -> int:
        """Follows the arguments' JSON; returns how many characters of the text belong to it."""
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
                self._broken |= letter == "\n"
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(text)


class MarkedReader(CallReader):
    """Reads calls whose arguments end before a mark.

    Args:
      head: pattern of a call's beginning, with the group `name` and optionally `id`.
      tail: the mark.
    """

    def __init__(self, head: re.Pattern[str], tail: str):
        super().__init__()
        self._head, self._tail = head, tail
        self._said = False  # some of the arguments of this call

    def _begin(self) -> CallPart | None:
        found = self._head.search(self._text)
        self._said = False
        return self._named(found, found["name"].strip()) if found else None

    def _inner(self) -> CallPart | None:
        before, found, after = self._text.partition(self._tail)
        if found:
            self._scan(before + found)
            self._text, self._inside = after, self._quoted
            out = before + found if self._inside else before.rstrip()
        else:
            out = before[: len(before) - unfinished(self._tail, before)].rstrip()
            self._text = self._text[len(out) :]
            self._scan(out)
        if not self._said:
            out = out.lstrip()
        self._said |= bool(out)
        return CallPart(arguments=out) if out or found else None


class JsonReader(CallReader):
    """Reads calls whose arguments are a JSON object; the object ends the arguments.

    Args:
      head: pattern of a call's beginning, up to the object, with the group `name`.
      quoted_name: whether the name is a JSON string.
      whole: reads the whole text if no head was found.
    """

    def __init__(
        self,
        head: re.Pattern[str],
        quoted_name: bool,
        whole: Callable[[str], list[CallPart]] | None = None,
    ):
        super().__init__()
        self._head, self._quoted_name, self._whole = head, quoted_name, whole

    @property
    def within(self) -> bool:
        """See `CallReader`; before a call has begun, its name or its arguments may be a string."""
        return self._quoted if self._inside else bool(_IN_STRING.fullmatch(self._text))

    def _begin(self) -> CallPart | None:
        found = self._head.match(self._text)
        if not found:
            return None
        name = _unquoted(found["name"]) if self._quoted_name else found["name"].strip()
        return self._named(found, name)

    def _inner(self) -> CallPart | None:
        size = self._scan(self._text)
        out, self._text = self._text[:size], self._text[size:]
        self._inside = self._depth > 0 or not out
        return CallPart(arguments=out) if out else None

    def _end(self, cut: bool) -> list[CallPart]:
        if self.begun or self._whole is None:
            return []
        parts = self._whole(self._text)
        if not parts and cut and (found := JSON_NAME.match(self._text)):
            parts = [self._named(found, _unquoted(found["name"]))]
        self.begun = bool(parts)
        return parts


class XmlReader(CallReader):
    """Reads calls with an XML element for each parameter; the arguments become JSON.

    Args:
      tags: the family's elements.
      types: schemas of the functions' parameters, which decide which values are texts.
    """

    def __init__(self, tags: "Tags", types: Types):
        super().__init__()
        self._tags, self._types = tags, types
        self._function = self._written = ""
        self._searched = 0

    @property
    def within(self) -> bool:
        """See `CallReader`: a parameter has begun and not ended."""
        return self._inside and self._searched > 0

    def _begin(self) -> CallPart | None:
        found = self._tags.invoke.search(self._text)
        if not found:
            return None
        self._function, self._written = found["name"], ""
        return self._named(found, self._function)

    def _inner(self) -> CallPart | None:
        found = self._tags.inside.search(self._text)
        if not found:
            return None
        if found["key"] is None:
            self._text, self._inside = self._text[found.end() :], False
            return CallPart(arguments="}" if self._written else "{}")
        start = max(found.end(), self._searched - 64)  # what was seen, up to half an end tag
        end = self._tags.value_end.search(self._text, start)
        if not end:
            self._searched = len(self._text)
            return None
        value, key = self._text[found.end() : end.start()], found["key"]
        self._text, self._searched = self._text[end.end() :], 0
        schema = self._types.get(self._function, {}).get(key)
        if string := found.groupdict().get("string"):
            schema = {"type": "string"} if string == "true" else {}
        out = f"{', ' if self._written else '{'}{quoted(key)}: {_json_value(value, schema)}"
        self._written = out
        return CallPart(arguments=out)

    def _end(self, cut: bool) -> list[CallPart]:
        if cut:
            return []
        # A name that nothing follows is a call without arguments (GLM-4.7).
        begun = None if self.begun else self._tags.invoke.search(f"{self._text}\n")
        parts = [self._named(begun, begun["name"])] if begun else []
        if self._inside:
            self._inside = False
            parts.append(CallPart(arguments="}" if self._written else "{}"))
        return parts


class Tags(msgspec.Struct, frozen=True):
    """The elements of a family.

    Attributes:
      invoke: begins a call; group `name`.
      inside: begins a parameter, group `key`, or ends the call. The group `string`, where a family
        has it, is "true" if the value is a text, and "false" if it is JSON.
      value_end: ends a parameter.
    """

    invoke: re.Pattern[str]
    inside: re.Pattern[str]
    value_end: re.Pattern[str]


def new_id() -> str:
    """Returns a new id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _kinds(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names; "any" where it names none."""
    if schema is True:
        return {"any"}
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(several), list):
            kinds = kinds.union(*map(_kinds, parts))
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {"string" if isinstance(one, str) else "other" for one in schema["enum"]}
    return kinds or {"any"}


def is_text(schema: Any) -> bool:
    """Whether a schema admits texts alone."""
    return _kinds(schema) <= {"string"}


def _json_value(text: str, schema: Any) -> str:
    """Writes a parameter as JSON: a text, unless its schema allows other values and it is one."""
    if not is_text(schema):
        text = text.strip()
        text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
        try:
            return _written(json.loads(text))
        except (ValueError, RecursionError):
            pass
    return quoted(text)


def _written(value: Any) -> str:
    """Writes JSON; lone surrogates are escaped. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def _unquoted(name: str) -> str:
    """The text of a JSON string; lone surrogates become question marks."""
    return json.loads(name).encode(errors="replace").decode()


def whole_json(body: str) -> list[CallPart]:
    """Reads one object with a name and arguments in any order; the arguments may be JSON text."""
    try:
        found = json.loads(body)
        arguments = found["arguments"]
        if not isinstance(arguments, str):
            arguments = _written(arguments)
        if isinstance(found["name"], str):
            name = _unquoted(_written(found["name"]))
            return [CallPart(name=name, id=new_id(), arguments=arguments)]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return []


_IN_STRING = re.compile(r'(?:[^"]++|"(?:[^"\\\n]|\\.)*+")*+"(?:[^"\\\n]|\\.)*+')
JSON_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\["\\/bfnrt])*")')

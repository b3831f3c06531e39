"""Translates chat templates from Jinja2's dialect to minijinja's, so that both render alike.

`translate` changes only what the two interpret differently, and keeps line numbers, so that errors
refer to the template's own lines:

* string methods are Python's (`x.split(',')` becomes `call_method(x, 'split', ',')`): minijinja has
  some of them, without keyword arguments and with a different set of white space;
* an undefined value reaches Python functions as UNDEFINED, not as none;
* `x[::-1]` becomes a call too (minijinja panics if `x` is empty);
* escapes in string literals are resolved as in Jinja2;
* `{% generation %}`, a marker for training that transformers adds to Jinja2, becomes a scope;
* `default(x, boolean=true)` passes its second argument by position;
* line ends become `\\n`, and the first one after `{% raw %}` is kept.

The released families' templates need none of this, other people's may: without it 20 of the 145
tests of `test_template.py` and `test_chat.py` fail (2026-11-22). Called by `template.py`. Knows
nothing of messages or models.
"""

import json
import re
from typing import NamedTuple

METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {
    *("encode", "format", "format_map", "maketrans", "translate"),  # not for templates to call
    *("center", "expandtabs", "ljust", "rjust", "zfill"),  # would make texts of any length
}
"""Methods of strings (`count` and `index` of lists too) that CALL_METHOD calls."""

CALL_METHOD = "call_method"
"""The function that translated templates call: `call_method(value, name, *arguments)`."""

REVERSED = "[::-1]"
"""The method name that stands for this subscript."""

UNDEFINED = "undefined_value"
"""Replaces an undefined value before FILTERS and TESTS, which distinguish it from none."""

FILTERS = frozenset({"tojson"})
TESTS = frozenset({"iterable", "sequence"})

STATEMENTS = {"generation": "with", "endgeneration": "endwith"}
"""Statements that minijinja does not have, and their replacements."""

# Names before a bracket that neither call nor index.
_KEYWORD = re.compile(
    "and|block|call|do|elif|else|extends|filter|for|if|import|in|include|is|macro|not|or|recursive"
    "|return|set|with"
)
_DELIMITER = re.compile(r"\{[{%#]")
_RAW = re.compile(r"\{%[-+]?\s*raw\s*(-?)%\}(?P<text>.*?)\{%[-+]?\s*endraw\s*[-+]?%\}", re.DOTALL)
_CLOSING = {"{%": re.compile(r"\s*[-+]?%\}"), "{{": re.compile(r"\s*-?\}\}")}
_TOKEN = re.compile(
    r"""(?P<space>\s*)(?:
        (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)
      | (?P<name>[^\W\d]\w*)
      | (?P<operator>==|!=|<=|>=|\S)
    )""",
    re.DOTALL | re.VERBOSE,
)
_BRACKETS = {")": "(", "]": "[", "}": "{"}


class _Token(NamedTuple):
    """A piece of code and the white space before it."""

    kind: str
    text: str
    space: str = ""


def translate(source: str) -> str:
    """The template in minijinja's dialect; malformed ones come back unchanged, for it to refuse."""
    source = re.sub("\r\n|\r", "\n", source)
    parts = []
    position = 0
    while opening := _DELIMITER.search(source, position):
        start = opening.start()
        parts.append(source[position:start])
        if opening[0] == "{#":
            end = source.find("#}", start)
            position = len(source) if end < 0 else end + 2
            parts.append(source[start:position])
        elif raw := _RAW.match(source, start):
            # minijinja would take a line end after the tag away.
            text, position = raw.start("text"), raw.end()
            kept = "\n" if source[text] == "\n" and not raw[1] else ""
            parts += [source[start:text], kept, source[text:position]]
        else:
            tokens, position = _read_code(source, start)
            parts += [token.space + token.text for token in _rewrite(tokens)]
    return "".join([*parts, source[position:]])


def _read_code(source: str, start: int) -> tuple[list[_Token], int]:
    """The tokens of the code that opens at `start`, delimiters included, and where it ends.

    As in Jinja2, an end delimiter counts only outside strings and brackets.
    """
    closing = _CLOSING[source[start : start + 2]]
    position, depth = start + 2 + (source[start + 2 : start + 3] in ("-", "+")), 0
    tokens = [_Token("delimiter", source[start:position])]
    while depth > 0 or not (end := closing.match(source, position)):
        found = _TOKEN.match(source, position)
        if found is None or found.lastgroup is None:
            return [*tokens, _Token("delimiter", source[position:])], len(source)
        token = _Token(found.lastgroup, found[found.lastgroup], found["space"])
        depth += (token.text in _BRACKETS.values()) - (token.text in _BRACKETS)
        tokens.append(token)
        position = found.end()
    return [*tokens, _Token("delimiter", end[0])], end.end()


def _rewrite(tokens: list[_Token]) -> list[_Token]:
    """The tokens of one piece of code, translated."""
    out: list[_Token] = []
    places = iter(range(len(tokens)))
    for place in places:
        token = tokens[place]
        after = [following.text for following in tokens[place + 1 : place + 6]]
        if token.text == "." and after[1:2] == ["("] and after[0] in METHODS:
            _call(out, after[0])
            if after[2:3] != [")"]:  # the method's own bracket closes the new call
                out.append(_Token("operator", ","))
            next(places), next(places)
        elif token.text == "[" and after == [":", ":", "-", "1", "]"]:
            _call(out, REVERSED)
            out.append(_Token("operator", ")"))
            for _ in after:
                next(places)
        elif (token.text == "|" and after[0] in FILTERS) or _is_test(token, after):
            mark = f"|default({UNDEFINED})"
            out += [_Token("operator", mark, token.space), token._replace(space=token.space or " ")]
        elif token.text == "boolean" and after[:1] == ["="]:
            next(places)
        elif place == 1 and tokens[0].text.startswith("{%") and token.text in STATEMENTS:
            out.append(token._replace(text=STATEMENTS[token.text]))
        elif token.kind == "string":
            out.append(token._replace(text=_literal(token.text)))
        else:
            out.append(token)
    return out


def _is_test(token: _Token, after: list[str]) -> bool:
    """Whether the tokens here are `is iterable`, `is not sequence` or the like."""
    name = after[1:2] if after[:1] == ["not"] else after[:1]
    return token.kind == "name" and token.text == "is" and set(name) <= TESTS


def _call(out: list[_Token], method: str) -> None:
    """Turns the operand at the end of the tokens into the first argument of an unclosed call."""
    start = _operand_start(out)
    out[start:] = [
        _Token("name", CALL_METHOD, out[start].space),
        _Token("operator", "("),
        out[start]._replace(space=""),
        *out[start + 1 :],
        _Token("operator", ","),
        _Token("string", f"'{method}'", " "),
    ]


def _operand_start(tokens: list[_Token]) -> int:
    """Start of the operand at the end of the tokens: `a.b[c](d)`, `(e)`, `{}` or `'f' 'g'`."""
    place = len(tokens) - 1
    while place > 1:
        token, before = tokens[place], tokens[place - 1]
        if token.text in _BRACKETS:
            place = _bracket_start(tokens, place)
            before = tokens[place - 1]
            indexed = before.kind == "string" or before.text in _BRACKETS
            called = before.kind == "name" and not _KEYWORD.fullmatch(before.text)
            if token.text == "}" or not (indexed or called):
                return place
            place -= 1
        elif before.text == ".":
            place -= 2
        elif token.kind == before.kind == "string":
            place -= 1
        else:
            return place
    return place


def _bracket_start(tokens: list[_Token], place: int) -> int:
    """Index of the bracket that the one at `place` closes."""
    depth = 0
    while place > 1:
        text = tokens[place].text
        depth += (text in _BRACKETS) - (text in _BRACKETS.values())
        if depth == 0:
            break
        place -= 1
    return place


def _literal(text: str) -> str:
    """A string literal with Jinja2's escapes (Python's) in the form that minijinja reads."""
    if "\\" not in text:
        return text
    known = re.sub(r"\\(.)", _escape, text[1:-1], flags=re.DOTALL)
    try:
        value = known.encode("ascii", "backslashreplace").decode("unicode-escape")
        value.encode()
    except UnicodeError:
        return text
    return json.dumps(value, ensure_ascii=False)


def _escape(found: re.Match[str]) -> str:
    """An escape as it is, or with its backslash doubled if Python does not know it."""
    return found[0] if found[1] in "\\'\"abfnrtvxNuU01234567\n" else "\\" + found[0]

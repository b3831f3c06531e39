"""Docstrings in plain English, and lines: each number here may fall, never rise."""

import ast
import re

from tests.conftest import REPOSITORY

FORMS = {
    r"\A(Of|As|By|For which|That|Those|These|It|They|Its|Their|What|Whose|So)\b(?! is a | are )": 0,
    r"\bso (many|much)\b|(?i:\b(whoever|nobody|somebody|who (has|is|gets|takes|asks|names))\b)": 0,
    r"(?i:\b(there (is|are|was|were)|(is|are|was|were) there)\b)": 86,
    r"\b[Ww]hat (is|are|has|comes|goes|came|was)\b": 56,
    r"\bof (them|it|those|these)\b|\bwhere (it|they|there|that|one) (is|are|has|have)\b": 229,
}

LINES = {
    "jaxserve pallas_kernels launch": 107_788,
    "tests": 60_000,
    "jaxserve/bench": 4_535,
    "jaxserve/planner": 8_323,
}
"""Most physical lines of Python in folders."""


def test_lines_only_fall():
    def lines(folders: str) -> int:
        files = [path for name in folders.split() for path in (REPOSITORY / name).rglob("*.py")]
        return sum(len(path.read_text().splitlines()) for path in files)

    found = {folders: lines(folders) for folders in LINES}
    assert {name: count for name, count in found.items() if count > LINES[name]} == {}


def test_docstrings_are_plain_english():
    rooms = [REPOSITORY / name for name in ("jaxserve", "pallas_kernels", "launch")]
    files = [path for room in rooms for path in room.rglob("*.py") if "_pb2" not in path.name]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    lone = [node.value for node in nodes if isinstance(node, ast.Expr)]
    texts = [one.value.strip() for one in lone if isinstance(getattr(one, "value", 0), str)]
    assert len(texts) > 8000
    found = {form: sum(len(re.findall(form, text)) for text in texts) for form in FORMS}
    assert {form: count for form, count in found.items() if count > FORMS[form]} == {}

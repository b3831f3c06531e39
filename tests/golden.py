"""Long expected texts live in files: `make golden` writes them anew, and a person reviews the diff.

A golden file holds what a person would have to read as a whole: a rendered manifest, a table of
figures. What can be said in one line, or follows from a property, stays in the test.
"""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "golden"
WRITE = "WRITE_GOLDEN"


def check(name: str, found: Any) -> None:
    """Compares a text, or a value that JSON can hold, with `tests/golden/NAME`.

    Raises:
        AssertionError: they differ, or the file is not there; `make golden` writes it.
    """
    text = found if isinstance(found, str) else json.dumps(found, indent=1, sort_keys=True) + "\n"
    path = FOLDER / name
    if os.environ.get(WRITE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is not there: make golden"
    assert text == path.read_text(), f"{path} differs: make golden, then review the diff"

"""Long expected texts live in files: `make golden` writes them anew, and a person reviews the diff.

A golden file holds what a person would have to read as a whole: a rendered manifest, a table of
figures. What can be said in one line, or follows from a property, stays in the test.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parent / "golden"
WRITE = "WRITE_GOLDEN"


def text(name: str) -> str:
    """Returns the content of `tests/golden/NAME`, which a test reads and does not write."""
    return (FOLDER / name).read_text()


def sizes(name: str) -> dict[str, Any]:
    """Returns the keys of a deployment that `tests/golden/sizes.yaml` has under this name."""
    found: dict[str, Any] = yaml.safe_load(text("sizes.yaml"))[name]
    return found


def check(name: str, found: Any) -> None:
    """Compares a text, or a value that JSON can hold, with `tests/golden/NAME`.

    Raises:
        AssertionError: they differ, or the file is not there; `make golden` writes it.
    """
    new = found if isinstance(found, str) else json.dumps(found, indent=1, sort_keys=True) + "\n"
    path = FOLDER / name
    if os.environ.get(WRITE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new)
    assert path.exists(), f"{path} is not there: make golden"
    assert new == path.read_text(), f"{path} differs: make golden, then review the diff"


def check_each(name: str, said: Callable[[str], str]) -> None:
    """Compares what is said of each mistake in `tests/golden/NAME`.

    The file lists the mistakes, each with the answer behind it, indented. A new mistake is a new
    line without an answer, which `make golden` writes.
    """
    mistakes = re.findall(r"^\S.*(?:\n\S.*)*", text(name), re.MULTILINE)
    assert len(mistakes) > 1, f"{name} lists no mistakes"
    entries = [f"{each}\n{indent(said(each).rstrip(), '    ')}\n" for each in mistakes]
    check(name, "\n".join(entries))


def table(name: str, mark: str = "") -> pytest.MarkDecorator:
    """Gives a test the rows of `tests/golden/NAME`, whose first row names its parameters. With a
    mark, the last column says which rows have it."""
    parameters, *rows = yaml.safe_load((FOLDER / name).read_text())
    if not mark:
        return pytest.mark.parametrize(parameters, rows)
    marks = [], [getattr(pytest.mark, mark)]
    marked = [pytest.param(*row[:-1], marks=marks[row[-1]]) for row in rows]
    return pytest.mark.parametrize(parameters[:-1], marked)


def check_refused(
    name: str, error: type[Exception], call: Callable[[str], object], folder: Path | None = None
) -> None:
    """Compares the errors that a call raises for each mistake in `tests/golden/NAME`.

    The name of a folder of the test's own is FOLDER there.
    """

    def said(mistake: str) -> str:
        with pytest.raises(error) as raised:
            call(mistake)
        message = str(raised.value)
        return message.replace(str(folder), "FOLDER") if folder else message

    check_each(name, said)


def check_arguments(
    name: str, error: type[Exception], call: Callable[..., object], names: dict[str, Any]
) -> None:
    """Compares the errors of a call for the arguments that `tests/golden/NAME` lists, as Python.

    Args:
      names: what the arguments may use; the `globals()` of the test.
    """
    check_refused(name, error, _evaluated(call, names))


def check_values(name: str, call: Callable[..., object], names: dict[str, Any]) -> None:
    """Compares the values of a call, as Python, in the same way. Arguments may have comments."""
    evaluated = _evaluated(call, names)
    check_each(name, lambda arguments: repr(evaluated(arguments)))


def _evaluated(call: Callable[..., object], names: dict[str, Any]) -> Callable[[str], object]:
    """The call as a function of a text with its arguments."""

    def evaluated(arguments: str) -> object:
        made = f"(lambda *places, **fields: (places, fields))({arguments}\n)"
        places, fields = eval(made, names)
        return call(*places, **fields)

    return evaluated

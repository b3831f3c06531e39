"""Chat templates of DeepSeek-V3.2 and V4, whose folders have a Python script in place of one.

The script is not run. It is parsed, and the strings at its top level that explain tools to the
model are given to this project's template of the family (`*.jinja` beside this file), which writes
messages and calls. Called by `chat.py`.
"""

import ast
import json
from pathlib import Path

_STRINGS = {
    "encoding_dsv32": {"tools_text": "TOOLS_SYSTEM_TEMPLATE"},
    "encoding_dsv4": {"tools_text": "TOOLS_TEMPLATE", "effort_text": "REASONING_EFFORT_MAX"},
}
"""Script → variable of our template → the script's name of the string."""
_FIELDS = {
    "dsml_token": "｜DSML｜",
    "thinking_start_token": "<think>",
    "thinking_end_token": "</think>",
    "tool_schemas": "{tool_schemas}",
}
"""Values of the fields in the script's strings; our template fills in the schemas."""


def script_template(folder: Path, problems: list[str]) -> str | None:
    """Returns the chat template for the script of a model folder; None if it has no known script.

    In mirrors and converted folders scripts lie in the folder itself.

    Appends to `problems` if the script cannot be read or lacks a string.
    """
    places = [folder / place / f"{stem}.py" for stem in _STRINGS for place in ("encoding", "")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        found = _strings(path.read_text(encoding="utf-8"))
        texts = {ours: found[name].format(**_FIELDS) for ours, name in _STRINGS[path.stem].items()}
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    except (LookupError, AttributeError) as error:
        problems.append(f"{path.name}: this string is missing, or this field is not known: {error}")
        return None
    own = Path(__file__).with_name(f"{path.stem}.jinja").read_text(encoding="utf-8")
    values = {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
    return "".join(f"{{% set {name} = {value} %}}" for name, value in values.items()) + own


def _strings(script: str) -> dict[str, str]:
    """Returns the strings that a script assigns to names at its top level."""
    found: dict[str, str] = {}
    for line in ast.parse(script).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found |= {one.id: value.value for one in targets if isinstance(one, ast.Name)}
    return found

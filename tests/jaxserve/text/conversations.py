"""Conversations of every shape that chat templates tell apart (`conversations.json`), and calls."""

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")
_READ: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))

TOOLS: list[dict[str, Any]] = _READ["tools"]
DESCRIBED_TOOLS: list[dict[str, Any]] = _READ["described_tools"]
"""Without anything left out, as some released templates need them."""
CONVERSATIONS: dict[str, list[dict[str, Any]]] = _READ["conversations"]
"""Any family's template renders these, with tools and without."""
OBJECT_CONVERSATIONS: dict[str, list[dict[str, Any]]] = _READ["object_conversations"]
"""For templates that write arguments themselves (DeepSeek's joins texts)."""
SENT: dict[str, list[dict[str, Any]]] = _READ["sent"]
"""Conversations as OpenAI's clients send them: no content beside a call, arguments as text."""


def tool(name: str, properties: dict[str, Any], about: str = "", **more: Any) -> dict[str, Any]:
    """A function to call, with the schema of its arguments."""
    parameters = {"type": "object", "properties": properties, **more}
    described = {"description": about} if about else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def call(arguments: Any, name: str = "weather", number: int = 0, **more: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    calls = [
        {"id": f"functions.{name}:{number + i}", "type": "function", "function": function}
        for i in range(more.pop("times", 1))
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}

"""Chat templates, rendered by Jinja2 in a process of its own.

`CheckedTemplate` is one template. The templates of models share a process (`limited_process.py`),
which runs `template_worker.py`; those of requests share another one. Called by `chat.py`. Knows
nothing of messages, tokenizers or models.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.text import template_worker
from jaxserve.text.limited_process import LimitError, the_process


class TemplateError(Exception):
    """The template is invalid, exceeded a limit or failed on its inputs; says where."""


class TemplateLimitError(TemplateError):
    """The template exceeded a limit, and would again."""


class TemplateRefusal(Exception):
    """The template called `raise_exception`; has the template's message."""


class CheckedTemplate:
    """A template, checked once. Safe for many threads.

    Args:
      text: source text of the template.
      author: "model" or "request".

    Attributes:
      source: as given.
      variables: names that the template reads and does not set, functions excluded.

    Raises:
      TemplateError: it cannot be parsed.
    """

    def __init__(self, text: str, author: str = "model"):
        self.source = text
        self._process = the_process(template_worker, author)
        self.variables = frozenset(self._ask(None)["variables"])

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for JSON values, as `plain` makes them.

        Raises:
          TemplateError, TemplateRefusal
        """
        return self._ask(values)["text"]

    def _ask(self, values: Mapping[str, Any] | None) -> Any:
        try:
            answer = self._process.ask({"source": self.source, "values": values})
        except LimitError as error:
            raise TemplateLimitError(str(error)) from None
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer


def plain(value: Any, *, name: str, depth: int = 64) -> Any:
    """A copy of JSON data, checked.

    Raises:
      ValueError: names the part that is not JSON, not valid Unicode, or nested too deeply.
    """
    if depth == 0:
        raise ValueError(f"{name}: is nested too deeply")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{name}: the key {key!r} is no text")
        return {
            _text(key, name): plain(item, name=f"{name}.{key}", depth=depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            plain(item, name=f"{name}[{index}]", depth=depth - 1)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str):
        return _text(value, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{name}: {type(value).__name__} is no JSON value")


def _text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: no Unicode text: lone surrogate at {error.start}") from None
    return str(text)

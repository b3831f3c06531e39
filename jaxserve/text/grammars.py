"""Structured outputs that clients ask for, as grammars compiled on a thread of their own.

Compiling takes up to tens of milliseconds, and a client may send one made to take longer: so they
are compiled one at a time, with a deadline. Made by `TextGenerator`, called by the handlers of both
faces; knows no protocol.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance

from jaxserve.errors import InvalidRequestError
from jaxserve.text.structured import GrammarCompiler, GrammarError, TokenGrammar, TokenRules
from jaxserve.text.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
"""How long compiling a grammar may take, including the wait for those before it."""

FIELD = "structured_outputs"
"""The request field of both faces that asks for one."""
MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}

Compile = Callable[[GrammarCompiler], TokenGrammar]


def form(asked: Mapping[str, Any]) -> tuple[str, Compile]:
    """The name of the structured output that is asked for, and a function that compiles it.

    Args:
      asked: `json` (a schema, or its text), `json_object` (True), `regex`, `choice` (texts) and
        `grammar` (Lark's), `structural_tag` (vLLM's, or its text); exactly one is set.

    Raises:
      InvalidRequestError: none is set, or several, or there are no or too many choices.
    """
    given = [name for name, value in asked.items() if value is not None and value is not False]
    if len(given) != 1:
        raise InvalidRequestError(FIELD, f"set one of {', '.join(asked)}")
    (name,) = given
    value = asked[name]
    if name == "choice" and not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequestError(f"{FIELD}.choice", f"{len(value)} texts, not 1 to {MAX_CHOICES}")
    compilers: dict[str, Compile] = {
        "json": lambda compiler: compiler.json_schema(value),
        "json_object": lambda compiler: compiler.json_schema(ANY_OBJECT),
        "regex": lambda compiler: compiler.regex(value),
        "choice": lambda compiler: compiler.choice(value),
        "grammar": lambda compiler: compiler.lark(value),
        "structural_tag": lambda compiler: compiler.structural_tags(_tags(value)),
    }
    return f"{FIELD}.{name}", compilers[name]


def _tags(asked: Any) -> list[llguidance.StructTag]:
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [text]}`, or its JSON text."""
    try:
        found = json.loads(asked) if isinstance(asked, str) else asked
        return [
            llguidance.StructTag(
                trigger=next(mark for mark in found["triggers"] if one["begin"].startswith(mark)),
                begin=one["begin"],
                grammar=one["schema"],
                end=one["end"],
            )
            for one in found["structures"]
        ]
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration):
        raise GrammarError(
            "expected structures with begin (that starts with one of the triggers), schema and end"
        ) from None


class Grammars:
    """The grammar compiler of one model, on a thread that starts with the first grammar.

    Args:
      tokenizer: the model's.
      vocab_size: of the model; may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compiled(self, field: str, compile_it: Compile) -> TokenGrammar:
        """Compiles a grammar for one request.

        Raises:
          InvalidRequestError: it is invalid, or was not compiled in time; names the field.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await loop.run_in_executor(self._thread, compile_it, self._compiler)
        except GrammarError as error:
            raise InvalidRequestError(field, str(error)) from None
        except TimeoutError:
            message = f"was not compiled within {COMPILE_SECONDS:g} s"
            raise InvalidRequestError(field, message) from None

    def ruled(self, grammar: TokenGrammar | None, rules: TokenRules) -> TokenGrammar:
        """A grammar, or none, with rules for single tokens."""
        return self._compiler.ruled(grammar, rules)

    def close(self) -> None:
        """Stops the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

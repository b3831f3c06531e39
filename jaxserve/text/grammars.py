"""Structured outputs that clients ask for, as grammars compiled on a thread of their own.

Compiling takes up to tens of milliseconds, and a client may send a grammar made to take longer.
Grammars are therefore compiled one at a time, with a deadline; grammars that are kept do not wait.
Made by `TextGenerator`, called by the handlers of both faces; knows no protocol.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxserve.errors import InvalidRequestError
from jaxserve.text.structured import GrammarCompiler, GrammarError, TokenGrammar, TokenRules
from jaxserve.text.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
"""How long compiling a grammar may take, including the wait for those before it."""

Form = Callable[[], str]
"""Makes a grammar for `GrammarCompiler.grammar`; raises GrammarError."""


class Grammars:
    """The grammar compiler of one model, on a thread that starts with the first grammar.

    Args:
      tokenizer: the model's tokenizer.
      vocab_size: vocabulary size of the model; may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compiled(self, field: str, form: Form) -> TokenGrammar:
        """Compiles a grammar for one request.

        Raises:
          InvalidRequestError: it is invalid, or was not compiled in time; names the field.
        """
        loop = asyncio.get_running_loop()
        try:
            asked = form()
            if (kept := self._compiler.kept(asked)) is not None:
                return kept
            async with asyncio.timeout(COMPILE_SECONDS):
                return await loop.run_in_executor(self._thread, self._compiler.grammar, asked)
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

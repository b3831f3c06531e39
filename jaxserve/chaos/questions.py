"""Requests whose answers are known: prompts of source code, completed greedily or with a seed.

The right answers are those of one colocated engine without a fleet and without a prefix cache. Used
by `storm.py`.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.bench.workers import Task, run_worker
from jaxserve.config.command_line import read_deployment
from jaxserve.engine.request import SamplingParams

WORDS = (
    "def fibonacci(n):\n    if n",
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\ndef main(",
    "for i in range(",
    "# sorts a list of",
    "x = [",
    "if __name__ == '__main__':\n",
    "    return self._",
    "while True:\n    try:",
    "with open(path) as file:\n",
    "raise ValueError(f'",
    "from typing import",
)
LONG = 6
"""Words of a prompt that fills several pages."""
TOKENS = (24, 40, 64, 96)
SHORT = (4, 8, 16, 24)
"""Lengths of answers where prompts share prefixes: the prompts are the load then."""
SYSTEM_WORDS = (3, 4, 8)
"""Words of a system prompt, which fills one to several pages."""
SECONDS = 600.0
COLOCATED = (
    "mode=colocated",
    "attention.runtime=main",
    "attention.processes=0",
    "ffn.runtime=main",
    "ffn.processes=0",
    "link.transport=device_put",
    "link.addresses=[]",
    "domains=1",
    "lanes=1",
    "prefill.workers=0",
    "fleet.prefill=[]",
    "fleet.domains=[]",
    "cache.prefix=false",
    "cache.host_gb=0",
    'cache.storage=""',
)


class Question(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
      prompt: text, or token ids.
      tokens: length of the answer.
      seed: seed of the sampling; None: greedy.
    """

    prompt: str | list[int]
    tokens: int
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, and of the faces'."""
        if self.seed is None:
            return {"temperature": 0.0}
        return {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.3, "seed": self.seed}


def questions(
    seed: int, count: int, longest: int, vocab: int = 0, systems: int = 0
) -> list[Question]:
    """Draws different questions, half of them greedy.

    Args:
      count: number of questions.
      longest: most tokens of an answer.
      vocab: for a model without words: prompts are token ids below this; 0: texts.
      systems: number of system prompts, with one of which each prompt begins; 0: prompts share no
        prefix.
    """
    draw = random.Random(seed)
    begins = [
        _text(draw, draw.choice(SYSTEM_WORDS), vocab, f"# system {number}")
        for number in range(systems)
    ]
    found = []
    for number in range(count):
        own = _text(draw, LONG if number % 3 == 0 else 1, vocab, f"\n# {number}")
        begin = begins[draw.randrange(systems)] if systems else own[:0]
        tokens = min(longest, draw.choice(SHORT if systems else TOKENS))
        seeded = draw.randrange(2**31) if number % 2 else None
        found.append(Question(begin + own, tokens, seeded))  # type: ignore[operator]
    return found


def _text(draw: random.Random, words: int, vocab: int, title: str) -> str | list[int]:
    """Draws lines of source code below a title; token ids for a model without words."""
    if vocab:
        return [draw.randrange(vocab) for _ in range(7 * words)]
    return "\n".join([title, *draw.sample(WORDS, words)])


def answers(
    asked: Sequence[Question], config: str | None, model: str | None, sets: Sequence[str]
) -> list[list[int]]:
    """Returns the token ids of each answer, from a process of its own; raises as `run_worker`."""
    given = {"asked": msgspec.to_builtins(asked), "config": config, "model": model}
    found = run_worker(Task(answer, {**given, "sets": sets}), SECONDS)
    return msgspec.convert(found, list[list[int]])


def answer(
    asked: Sequence[Any], config: str | None, model: str | None, sets: Sequence[str]
) -> list[list[int]]:
    """In the worker: answers the questions with a colocated engine."""
    from jaxserve.llm import LLM

    known = msgspec.convert(asked, list[Question])
    with LLM(read_deployment(config, model, [*sets, *COLOCATED])) as llm:
        params = [
            SamplingParams(max_tokens=one.tokens, ignore_eos=True, **one.sampling) for one in known
        ]
        outputs = llm.generate([one.prompt for one in known], params)
    return [output.token_ids for output in outputs]

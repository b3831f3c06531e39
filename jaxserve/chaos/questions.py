"""Requests whose answers are known: prompts of source code, completed greedily or with a seed.

`python -m jaxserve.chaos.questions --config FILE --result FILE` writes their answers, as one
colocated engine without a fleet gives them. Used by `storm.py`.
"""

import argparse
import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.bench.workers import Worker, run_worker, writing

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
SECONDS = 600.0
COLOCATED = (
    "mode=colocated",
    "attention.runtime=main",
    "ffn.runtime=main",
    "link.transport=device_put",
    "link.addresses=[]",
    "domains=1",
    "lanes=1",
    "prefill.workers=0",
    "fleet.prefill=[]",
    "fleet.domains=[]",
)


class Question(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
      prompt: text, or token ids.
      tokens: of the answer.
      seed: of the draws; None: greedy.
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


def questions(seed: int, count: int, longest: int, vocab: int = 0) -> list[Question]:
    """So many different ones, half of them greedy.

    Args:
      longest: tokens of an answer, at most.
      vocab: of a model without words: prompts are token ids below this; 0: texts.
    """
    draw = random.Random(seed)
    found = []
    for number in range(count):
        words = LONG if number % 3 == 0 else 1
        prompt: str | list[int]
        if vocab:
            prompt = [draw.randrange(vocab) for _ in range(7 * words)]
        else:
            prompt = "\n".join([*draw.sample(WORDS, words), f"# {number}"])
        tokens = min(longest, draw.choice(TOKENS))
        found.append(Question(prompt, tokens, draw.randrange(2**31) if number % 2 else None))
    return found


def answers(
    asked: Sequence[Question], config: str | None, model: str | None, sets: Sequence[str]
) -> list[list[int]]:
    """Token ids of each answer, from a process of its own; raises as `run_worker`."""
    arguments = ["--questions", msgspec.json.encode(asked).decode()]
    for name, value in (("--config", config), ("--model", model)):
        arguments += [name, value] if value is not None else []
    for one in sets:
        arguments += ["--set", one]
    found = run_worker(Worker("jaxserve.chaos.questions", arguments), SECONDS)
    return msgspec.convert(found["answers"], list[list[int]])


def _main() -> None:
    from jaxserve.config.command_line import add_deployment_arguments, read_deployment
    from jaxserve.engine.request import SamplingParams
    from jaxserve.llm import LLM

    parser = argparse.ArgumentParser()
    add_deployment_arguments(parser)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--result")
    options = parser.parse_args()
    asked = msgspec.json.decode(options.questions, type=list[Question])
    deployment = read_deployment(options.config, options.model, [*options.set, *COLOCATED])
    with writing(options.result) as result, LLM(deployment) as llm:
        outputs = llm.generate(
            [question.prompt for question in asked],
            [
                SamplingParams(max_tokens=question.tokens, ignore_eos=True, **question.sampling)
                for question in asked
            ],
        )
        result["answers"] = [output.token_ids for output in outputs]
    os._exit(0)


if __name__ == "__main__":
    _main()

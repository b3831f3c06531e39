"""Log-likelihoods of continuations as lm-eval asks for them, against the reference in NumPy."""

import math
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.jaxserve import layouts
from tests.jaxserve.layouts import PROMPTS
from tests.reference.step3_numpy import Step3Numpy

SECONDS = 60


@pytest.fixture(scope="module")
def url(colocated_runtime) -> Iterator[str]:
    with layouts.listening(colocated_runtime) as url:
        yield url


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_several_at_once_in_one_request(url: str, tiny_model) -> None:
    model = Step3Numpy.from_folder(tiny_model)
    contexts = [PROMPTS[1][:50], PROMPTS[3][:7], PROMPTS[4][:1]]
    greedy = list(contexts[0])
    for _ in range(5):
        greedy.append(int(np.argmax(model.logits(greedy)[-1])))
    whole = [greedy, contexts[1] + PROMPTS[5][:9], contexts[2] + PROMPTS[6][:20]]
    body = {"prompt": whole, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()["choices"]
    for context, tokens, choice in zip(contexts, whole, choices, strict=True):
        found = choice["logprobs"]
        own = slice(len(context), -1)  # without the token that was generated
        rows = log_softmax(model.logits(tokens))[len(context) - 1 : -1]
        wanted = math.fsum(row[t] for row, t in zip(rows, tokens[len(context) :], strict=True))
        assert sum(found["token_logprobs"][own]) == pytest.approx(wanted, abs=2e-3)
        # lm-eval's question whether the continuation is what the model would have said
        said = zip(found["tokens"][own], found["top_logprobs"][own], strict=True)
        is_greedy = all(token == max(top, key=top.__getitem__) for token, top in said)
        assert is_greedy == (tokens is greedy)

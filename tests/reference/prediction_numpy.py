"""Proposals of modules of multi-token prediction, in plain NumPy (DeepSeek-V3 §2.2). Modules of
Step-3.5 have their own heads, and pass on what lies before norms.

For tests; over `step3_numpy.py` and `decoder_numpy.py`. Everything is computed anew for every
draft: there is no cache, and no batch, that could be wrong.
"""

from typing import NamedTuple

import numpy as np

from tests.reference.decoder_numpy import DecoderNumpy, Step3p5Numpy


class Drafts(NamedTuple):
    """After some tokens of a sequence."""

    token: int
    """The model's own next one."""
    drafts: list[int]
    """Tokens that may follow it."""
    margin: float
    """Least distance of all choices between the best logit and the second best."""


def propose(model: DecoderNumpy, tokens: list[int], modules: int, count: int) -> Drafts:
    """The greedy next token and `count` drafts. Draft m is module m's; the last module makes those
    behind it, of its own hidden state and draft, a position further."""

    margins = []

    def best(logits: np.ndarray) -> int:
        second, first = np.sort(logits)[-2:]
        margins.append(float(first - second))
        return int(logits.argmax())

    hidden = model.hidden(tokens)
    token, own = best(model.head(hidden[-1])), isinstance(model, Step3p5Numpy)
    hidden = model.stream(tokens) if own else hidden
    following, drafts, rows = [*tokens[1:], token], [], hidden
    for number in range(count):
        layer = model.layers + min(number, modules - 1)
        if number < modules:
            rows = model.joined(layer, hidden, following)
        else:
            rows = np.concatenate([rows, model.joined(layer, hidden[-1:], following[-1:])])
        hidden, name = model.decoder_layer(layer, rows), f"model.layers.{layer}"
        if own:
            head = f"{name}.transformer.shared_head"
            drafts.append(
                best(model.linear(f"{head}.output", model.norm(f"{head}.norm", hidden[-1])))
            )
        else:
            hidden = model.norm(f"{name}.shared_head.norm", hidden)
            drafts.append(best(model.head(hidden[-1])))
        following = [*following[1:], drafts[-1]]
    return Drafts(token, drafts, min(margins))

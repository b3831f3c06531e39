"""Runtimes and steps for models of `tests/reference/long_prompts.py`."""

import numpy as np

from jaxserve.config.load import load_deployment
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.runtime import warm_up
from jaxserve.fleet.assembly import build_runtime
from tests.jaxserve.stepping import Sequences
from tests.reference.long_prompts import EVERY, OUTPUT_TOKENS

GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)


def loaded(folder, overrides):
    """A runtime whose programs have run."""
    runtime = build_runtime(load_deployment(folder, overrides))
    warm_up(runtime)
    return runtime


def check_logits(runtime, recorded, chunk):
    """Compares the logits of prompts and continuations, fed in chunks of this size, and again
    token by token: the first prompt from its start, the others behind chunks."""
    tokens, logits = recorded.golden()
    whole = [prompt + more for prompt, more in zip(recorded.questions(), tokens, strict=True)]
    for until in ([], [0, 60, 140]):
        for index, rows in enumerate(Sequences(runtime, whole).in_chunks(chunk, until)):
            own = [at for at in rows if at % EVERY == 0]
            found = [rows[at] for at in own]
            wanted = [logits[index][at // EVERY] for at in own]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4, err_msg=f"{index} {until}")

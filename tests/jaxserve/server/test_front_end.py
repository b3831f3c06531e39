import threading

import anyio

from jaxserve.engine.request import TokenLogprobs
from jaxserve.server.front_end import FrontEnd
from jaxserve.text.generator import SHORT_PROMPT
from jaxserve.text.output import GenerationOutput


def test_log_probabilities_of_long_prompts_are_written_beside_the_event_loop() -> None:
    async def threads() -> list[bool]:
        front_end = FrontEnd()
        found = []
        for count in (0, SHORT_PROMPT - 1, SHORT_PROMPT):
            scores = [TokenLogprobs(1, -0.5, ())] * count
            output = GenerationOutput(request_id="a", prompt_logprobs=scores or None)
            ident = await front_end.with_scores(output, threading.get_ident)
            found.append(ident == threading.get_ident())
        front_end.close()
        return found

    assert anyio.run(threads) == [True, True, False]

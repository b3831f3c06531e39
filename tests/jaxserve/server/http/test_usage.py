from unittest.mock import Mock

import msgspec

from jaxserve.engine.request import SamplingParams
from jaxserve.server.front_end import Job, Source
from jaxserve.server.http.service import UsageCount
from jaxserve.text.output import GenerationOutput


def test_drafts_are_counted_over_the_choices():
    jobs = [Job(index, [1, 2], SamplingParams()) for index in range(2)]
    count = UsageCount(jobs, 2)
    for job, drafted, accepted in ((jobs[0], 3, 1), (jobs[1], 3, 3), (jobs[0], 6, 4)):
        output = GenerationOutput(
            request_id="a",
            token_ids=[5],
            drafted_token_count=drafted,
            accepted_token_count=accepted,
        )
        count.add(Mock(spec=Source, job=job), output)
    details = msgspec.to_builtins(count.usage())["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 2,
    }

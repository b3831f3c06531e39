import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.request_checks import due


@pytest.mark.parametrize(
    ("priority", "deadline", "expected"),
    [
        (0, None, 110.0),
        (1, None, 120.0),
        (-1, None, 100.0),
        (0, 105.0, 105.0),
        (0, 300.0, 110.0),
        (-2, 105.0, 90.0),
    ],
)
def test_due(priority, deadline, expected):
    params = SamplingParams(priority=priority)
    request = Request(request_id="a", prompt=[1], params=params, arrival=100.0, deadline=deadline)
    assert due(request) == expected

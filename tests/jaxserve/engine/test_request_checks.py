from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.request_checks import due
from tests import golden


def test_due():
    def call(priority, deadline):
        params = SamplingParams(priority=priority)
        times = {"arrival": 100.0, "deadline": deadline}
        return due(Request(request_id="a", prompt=[1], params=params, **times))

    golden.check_values("engine/due.txt", call, globals())

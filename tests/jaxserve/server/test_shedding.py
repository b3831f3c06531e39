"""Which requests are refused because they would wait too long, by a clock of the test's own."""

import pytest

from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import OverloadedError
from jaxserve.observe import load as loads
from jaxserve.observe.load import DomainLoad, EngineLoad
from jaxserve.server.shedding import Shedding, shedding, waiting_in
from tests import golden
from tests.jaxserve.server.faces import Faces
from tests.jaxserve.text.fake_engine import FakeEngine

LIMIT = 15.0


class Queue:
    """An engine with some slots; a request holds its slot for so many seconds of `now`."""

    def __init__(self, slots: int, seconds: float):
        self.now, self.slots, self.seconds = 0.0, slots, seconds
        self.running: list[float] = []  # when they end
        self.waiting: list[tuple[float, int, object]] = []  # rank and receiver
        self.first: dict[str, float] = {}  # request → seconds to its first token
        self.status = "ready"
        self._count = 0

    def load(self) -> EngineLoad:
        running, waiting = len(self.running), len(self.waiting)
        domains = [DomainLoad(running=running, waiting=waiting)]
        return EngineLoad(running=running, waiting=waiting, slots=self.slots, domains=domains)

    def submit(self, prompt, params, on_output, *, request_id=None, deadline=None):
        self._count += 1
        due = self.now + 10 * params.priority
        self.waiting.append((due, self._count, (request_id, self.now, on_output)))
        self.admit()
        return request_id

    def until(self, when: float) -> None:
        while self.running and min(self.running) <= when:
            self.now = min(self.running)
            self.running.remove(self.now)
            self.admit()
        self.now = when

    def admit(self) -> None:
        self.waiting.sort(key=lambda one: one[:2])
        while self.waiting and len(self.running) < self.slots:
            _, _, (name, arrival, on_output) = self.waiting.pop(0)
            self.running.append(self.now + self.seconds)
            self.first[name] = self.now - arrival
            on_output(TokenOutput(request_id=name, token_ids=[1]))


def made(slots: int, seconds: float) -> tuple[Queue, Shedding]:
    engine = Queue(slots, seconds)
    return engine, Shedding(engine, LIMIT, lambda: engine.now)


def offer(engine, front, rate, begin, end, priorities=(0,)):
    """Requests at a rate; how many were accepted, and the refusals."""
    accepted, refused = dict.fromkeys(priorities, 0), []
    for number in range(int((end - begin) * rate)):
        engine.until(begin + number / rate)
        priority = priorities[number % len(priorities)]
        params = SamplingParams(priority=priority)
        try:
            front.submit(
                [1], params, lambda output: None, request_id=f"{begin}-{number}-{priority}"
            )
            accepted[priority] += 1
        except OverloadedError as error:
            refused.append((priority, error))
    return accepted, refused


def test_twice_the_capacity_is_shed_to_the_capacity():
    engine, front = made(slots=8, seconds=4.0)  # 2 requests a second
    accepted, refused = offer(engine, front, rate=4.0, begin=0.0, end=180.0)
    engine.until(180.0)
    assert len(engine.first) >= 0.95 * 2 * 180
    assert max(engine.first.values()) <= 1.2 * LIMIT
    assert accepted[0] == pytest.approx(2 * 180 + 2 * LIMIT, abs=12)
    _, error = refused[-1]
    assert "the wait for a first token is estimated at 1" in str(error)
    assert "server.wait_seconds = 15" in str(error)
    assert 0 < error.retry_after_s < 2


def test_nothing_is_refused_below_the_capacity_nor_after_an_overload():
    engine, front = made(slots=8, seconds=4.0)
    assert offer(engine, front, rate=1.8, begin=0.0, end=60.0)[1] == []
    assert offer(engine, front, rate=8.0, begin=60.0, end=90.0)[1] != []
    engine.until(110.0)
    assert not engine.waiting
    assert offer(engine, front, rate=1.8, begin=110.0, end=170.0)[1] == []


def test_a_burst_on_free_slots_is_no_overload():
    engine, front = made(slots=64, seconds=100.0)  # 0.64 requests a second
    offer(engine, front, rate=2.0, begin=0.0, end=100.0)
    engine.until(1000.0)
    assert not engine.running
    assert offer(engine, front, rate=1e4, begin=1000.0, end=1000.0064)[1] == []


def test_classes_that_are_served_earlier_are_refused_last():
    engine, front = made(slots=8, seconds=4.0)
    accepted, refused = offer(engine, front, 4.0, 0.0, 240.0, priorities=(0, -2, 0, 0))
    assert {priority for priority, _ in refused} == {0}
    assert accepted[-2] == 240
    urgent = [wait for name, wait in engine.first.items() if name.endswith("-2")]
    assert max(urgent) < 8.0


def test_a_queue_that_stands_still_is_noticed():
    engine, front = made(slots=2, seconds=1.0)
    offer(engine, front, rate=3.0, begin=0.0, end=20.0)
    engine.running = [1e6, 1e6]  # nothing ends any more
    accepted, refused = offer(engine, front, rate=3.0, begin=20.0, end=140.0)
    assert accepted[0] < 60
    assert refused[-1][1].retry_after_s > 15


def test_none_is_refused_without_a_limit():
    engine = Queue(1, 1.0)
    assert shedding(engine, 0.0) is engine
    assert isinstance(front := shedding(engine, 15.0), Shedding)
    assert front.status == "ready"


def test_what_waits():
    """`golden/server/waiting.txt` lists loads."""
    golden.check_values("server/waiting.txt", waiting_in, vars(loads))


def crowded(engine: FakeEngine) -> Shedding:
    """The load says that two requests wait, and that one begins every ten seconds."""
    engine.allowed = 0
    front = Shedding(engine, LIMIT, lambda: 40.0)
    for now in range(0, 50, 10):
        front._uptake.taken_up(now, waiting=1)
    return front


def test_over_both_faces():
    faces = Faces(front=crowded)
    body = {"prompt": "hi", "stream": True}
    streams = [faces.client.stream("POST", "/v1/completions", json=body) for _ in range(2)]
    with streams[0], streams[1]:
        answer = faces.post(stream=True)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        estimate = "the wait for a first token is estimated at 20.0 s"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert estimate in error["message"]
        status, message = faces.grpc_error()
        assert status == "RESOURCE_EXHAUSTED"
        assert estimate in message
        urgent = faces.client.stream("POST", "/v1/completions", json=body | {"priority": -1})
        with urgent as answer:
            assert answer.status_code == 200
    faces.close()

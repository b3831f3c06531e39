"""The arithmetic of a storm, on requests and faults that are written down here."""

from jaxserve.bench.report import missed
from jaxserve.chaos.figures import Event, Found, back, gaps, lost, parts, silence
from jaxserve.chaos.load import Record, how_it_failed
from tests import golden


def event(at=10.0, until=14.0, kind="kill", role="domain", **changed):
    roles = tuple(role.split("+"))
    values = {"seconds": 0.0, "how": "", "size": 0.0, "name": role, "noticed": 0.3}
    return Event(kind=kind, roles=roles, at=at, until=until, **(values | changed))


def record(number, start, arrivals, end="right", **changed):
    finish = arrivals[-1] if arrivals else start
    values = {"number": number, "face": "http", "question": 0, "finish": finish, "wanted": start}
    return Record(start=start, arrivals=arrivals, end=end, **(values | changed))


def test_back_is_the_longest_wait_from_the_fault_on():
    records = [
        record(0, 8.0, [9.0, 11.5, 11.6]),  # waits from 9.0, of which 1.5 s after the fault
        record(1, 12.0, [12.7, 12.8]),  # began after it
        record(2, 1.0, [2.0, 9.9]),  # was over
        record(3, 9.5, [19.0], "cancelled"),
        record(4, 15.0, [15.1], wanted=13.6),  # its client's attempts had failed since then
    ]
    assert back(event(), 20.0, records) == 1.5
    assert back(event(at=11.7), 14.0, records) == 12.7 - 12.0
    assert back(event(at=14.5), 20.0, records) == 15.1 - 14.5
    assert back(event(), 11.0, records) == 1.0, "what comes after the next fault is that one's"
    assert silence(event(at=9.95, until=12.0), 20.0, records) == 11.5 - 9.95
    assert silence(event(at=12.9, until=15.0), 20.0, records) == 15.1 - 12.9, "the next token"
    assert silence(event(at=19.5), 30.0, records) == float("inf")


def test_a_judge_breaks_nothing_and_counts_what_it_did():
    found = Found(
        events=[],
        records=[record(0, 1.0, [2.0]), record(1, 1.0, [2.0], "wrong", why="[3] instead of [4]")],
        calm=(0.0, 9.0),
        resets=2,
        handed=640,
    )
    (part,) = parts(found)
    values = {measure.name: measure.value for measure in part.measures}
    assert (values["requests"], values["right"], values["wrong"]) == (2, 1, 1)
    assert values["resets of the prefix caches"] == 2
    assert values["tokens handed over by prefill workers"] == 640
    assert missed([part]) == ["all: wrong"]


def test_gaps_of_those_that_lost_their_worker_are_not_others():
    steady = record(0, 0.0, [1.0, 1.25, 1.5, 3.0])
    touched = record(1, 0.0, [0.5, 2.5])
    cut = record(2, 0.0, [0.5, 2.5], resumed=1)
    assert gaps([steady, touched, cut], 1.2, 4.0) == [0.25, 0.25, 1.5, 2.0]
    assert gaps([steady, touched, cut], 1.2, 4.0, {1}) == [0.25, 0.25, 1.5]
    assert gaps([steady], 1.2, 3.0, {1}) == [0.25, 0.25], "those that end in that time"


def steps(number, begin, end, step):
    count = round((end - begin) / step)
    return record(number, begin, [begin + n * step for n in range(count)])


def test_p99_of_other_requests():
    def ratio(kind, role):
        found = Found(
            events=[event(kind=kind, role=role, at=10.0, until=14.0, seconds=4.0, touched=[2])],
            records=[
                steps(0, 0.0, 4.0, 0.01),
                steps(1, 10.1, 13.9, 0.03),
                record(2, 9.0, [9.5, 13.5]),
            ],
            calm=(0.0, 5.0),
        )
        measures = {measure.name: measure for measure in parts(found)[0].measures}
        title = "longest delay of a token at {}, in iterations: {}"
        delays = [title.format(when, "most") for when in ("the fault", "moments without one")]
        assert [round(measures[each].value) for each in delays] == [399, 0]
        return measures["p99 between tokens of other requests ÷ undisturbed"]

    assert round(ratio("kill", "domain").value, 2) == 3.0
    judged = [("kill", "domain"), ("stop", "follower"), ("drop", "prefill"), ("disk", "router")]
    assert [ratio(*each).met for each in judged] == [False] * 4
    spared = [("kill", "ffn"), ("slow", "domain"), ("kill", "domain+prefill")]
    assert [ratio(*each).met for each in spared] == [None] * 3


def test_bad_ends_belong_to_the_fault_that_they_met():
    found = Found(
        events=[event(at=10.0, until=14.0), event(role="ffn", at=20.0, until=21.0)],
        records=[
            record(0, 9.0, [19.5], "hung", finish=79.5),  # its last token came before the second
            record(1, 9.0, [12.0], "wrong"),
            record(2, 9.0, [25.0]),
        ],
        calm=(0.0, 5.0),
    )
    domain, ffn = (
        {measure.name: measure.value for measure in part.measures} for part in parts(found)[:2]
    )
    assert (domain["hung"], domain["wrong"]) == (0, 1)
    assert (ffn["hung"], ffn["wrong"]) == (1, 0)


def test_a_request_is_lost_unless_its_own_connection_was_killed():
    cut = record(0, 11.0, [12.0], "cut")
    assert lost(cut, [event(role="domain")])
    assert lost(cut, [event(role="router", at=20.0, until=30.0)])
    assert not lost(cut, [event(role="router")])
    assert not lost(cut, [event(role="face+ffn")])
    assert not lost(record(0, 11.0, [12.0], "failed"), [])


def test_limits():
    good = Found(
        events=[event(), event(at=20.0, until=21.0, noticed=1.9)],
        records=[record(0, 9.0, [9.5, 11.0])],
        calm=(0.0, 5.0),
    )
    assert missed(parts(good)) == []
    bad = Found(
        events=[event(), event(at=25.0, until=26.0, noticed=None)],
        records=[
            record(0, 9.0, [9.5, 21.0]),
            record(1, 9.0, [], "wrong"),
            record(2, 9.0, [], "hung"),
            record(3, 9.0, [], "cut"),
            record(4, 9.0, [], "failed"),
        ],
        calm=(0.0, 5.0),
        left="held=1",
        late=["domain 0 after kill"],
    )
    golden.check("chaos/missed.txt", "\n".join(missed(parts(bad))) + "\n")


def test_limits_of_processes_that_die_together():
    def judged(arrival, until, role="domain+ffn"):
        found = Found(
            events=[event(role=role, at=10.0, until=until)],
            records=[record(0, 9.0, [9.5, arrival])],
            calm=(0.0, 5.0),
        )
        return missed(parts(found))

    assert judged(24.9, 39.9) == []
    assert judged(25.1, 40.1) == [
        "kill domain+ffn: longest wait for a token, longest",
        "kill domain+ffn: all processes ready again, longest",
    ]
    assert judged(24.9, 40.1, "ffn") == ["kill ffn: longest wait for a token, longest"]


def test_a_short_pause_need_not_be_noticed():
    assert not event(kind="stop", seconds=1.5).to_be_noticed
    assert event(kind="stop", seconds=2.5).to_be_noticed
    assert not event(kind="stop", role="router", seconds=5.0).to_be_noticed
    assert not event(kind="disk", seconds=5.0).to_be_noticed


def test_what_clients_make_of_errors():
    golden.check_values("chaos/errors.txt", how_it_failed, {})

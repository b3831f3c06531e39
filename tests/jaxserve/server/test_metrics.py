"""The exposition after known requests, and of engines with known loads."""

from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.request import SamplingParams
from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import DomainLoad, EngineLoad, WorkerLoad
from jaxserve.observe.view import FFNWorkerView, PipelineView, Transfers
from jaxserve.roles.expert_view import ExpertView
from jaxserve.server import engine_metrics, metrics
from jaxserve.server.metrics import Metrics
from jaxserve.text.output import GenerationOutput
from tests import golden
from tests.jaxserve.text.fake_engine import FakeEngine
from tests.jaxserve.waiting import Clock

DATE = 1_700_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock, and a calendar that shows DATE at first."""
    clock = Clock()
    times = SimpleNamespace(monotonic=clock, time=lambda: DATE + clock())
    for module in (engine_metrics, metrics):
        monkeypatch.setattr(module, "time", times)
    return clock


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name, with its labels but the model's → value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("process_"):
            continue
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sample.labels.items() if k != "model_name"]
            found[" ".join([sample.name.removeprefix("jaxserve:"), *labels])] = sample.value
            assert sample.labels["model_name"] == "m"
    return found


def test_the_times_of_a_request(clock: Clock) -> None:
    metrics = Metrics("m")
    note = metrics.started(SamplingParams())
    for seconds, tokens, reason in ((2.0, 1, None), (0.5, 2, None), (0.25, 1, "length")):
        clock.now += seconds
        note(
            GenerationOutput(
                request_id="a",
                token_ids=[1] * tokens,
                finish_reason=reason,
                prompt_token_count=7,
                completion_token_count=4,
                queue_seconds=0.5,
            )
        )
    found = samples(metrics)
    seconds = {
        "time_to_first_token": 2.0,
        # Two tokens that came together count as one observation of half the time each.
        "inter_token_latency": 0.25 + 0.25,
        "request_time_per_output_token": 0.25,
        "e2e_request_latency": 2.75,
        "request_queue_time": 0.5,
        "request_prefill_time": 1.5,
        "request_decode_time": 0.75,
    }
    assert {name: found[f"{name}_seconds_sum"] for name in seconds} == seconds
    counts = {name: found[f"{name}_seconds_count"] for name in seconds}
    assert counts == dict.fromkeys(seconds, 1) | {"inter_token_latency": 2}
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (7, 4)
    assert found["request_generation_tokens_sum"] == 4
    assert found["request_success_total finished_reason=length"] == 1
    counts = metrics.counts()
    assert (counts.generated, counts.ended, counts.refused) == (4, {"length": 1}, {})
    assert {name: sum(times.counts) for name, times in counts.times.items()} == {
        "first": 1,
        "between": 2,
    }
    assert counts.times["first"].counts[counts.times["first"].bounds.index(2.5)] == 1
    buckets = ("request_prompt_tokens", (5.0, 10.0)), ("time_to_first_token_seconds", (1.2, 2.5))
    for name, edges in buckets:
        assert [found[f"{name}_bucket le={edge}"] for edge in edges] == [0, 1]


def test_a_request_that_the_engine_refuses_counts_nothing(clock: Clock) -> None:
    metrics = Metrics("m")
    metrics.started(SamplingParams())
    assert samples(metrics)["prompt_tokens_total"] == 0


def test_a_request_without_a_token(clock: Clock) -> None:
    metrics = Metrics("m")
    metrics.started(SamplingParams())(GenerationOutput(request_id="a", finish_reason="cancelled"))
    found = samples(metrics)
    assert found["request_success_total finished_reason=cancelled"] == 1
    assert found["time_to_first_token_seconds_count"] == 0


VIEW = PipelineView(
    measured_at=DATE - 10,
    busy={"attend": 0.75, "dispatch": 0.125, "ffn": 0.5},
    bubble=0.25,
    transfers={"dispatch": Transfers(4, 0.5)},
    experts=ExpertView(imbalance=2.5),
    ffn=[FFNWorkerView(passes=5, messages=9, rows=72, places=12, left_behind=2, misjudged=0.25)],
)


def watching(load: EngineLoad | None = None, view: PipelineView = VIEW) -> dict[str, float]:
    """Exposed figures of an engine with this load and view, without those of requests."""
    engine, metrics = FakeEngine([], view=view), Metrics("m")
    of_requests = samples(metrics)
    if load is not None:
        engine.load = lambda: load
    metrics.watch(engine)
    found = samples(metrics).items()
    return {name: round(value, 6) for name, value in found if name not in of_requests}


def test_an_engine(clock: Clock) -> None:
    golden.check("server/metrics_of_an_engine.json", watching())


def test_what_was_measured_long_ago_is_not_now(clock: Clock) -> None:
    clock.now += 51
    found = watching()
    assert not [name for name in found if name.startswith(("stage_", "bubble_"))]
    assert found["transfer_seconds_count direction=dispatch"] == 4  # a counter


def test_a_fleet(clock: Clock) -> None:
    """Two domains with their groups, workers, of which one is absent, and the pages link."""
    domains = [
        DomainLoad(running=3, waiting=1, kv_usage=[0.2, 0.4]),
        DomainLoad(running=5, waiting=0, kv_usage=[0.5, 0.9]),
    ]
    load = msgspec.structs.replace(
        EngineLoad.of(domains, queued=2, page_size=16, pages=10, compilations=0),
        workers=[
            WorkerLoad(name="p:1", role="prefill", status="ready", held=2, pages_tokens=640),
            WorkerLoad(name="d:1", role="domain", status="absent", running=3),
        ],
        replays=4,
        moves=3,
        refusals=5,
        hand_offs=PagesLoad(
            transfers=3, bytes=4096, failures=1, corrupt=5, queued=2, wait_seconds=0.5, expired=4
        ),
    )
    golden.check("server/metrics_of_a_fleet.json", watching(load, PipelineView()))

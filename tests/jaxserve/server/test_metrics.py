"""What the exposition says after known requests."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.load import DomainLoad, EngineLoad, PagesLoad, WorkerLoad
from jaxserve.observe.view import PipelineView, Transfers
from jaxserve.roles.expert_view import ExpertView
from jaxserve.server import metrics as module
from jaxserve.server.metrics import Metrics
from jaxserve.text.output import GenerationOutput
from tests.jaxserve.text.fake_engine import FakeEngine


class Clock:
    """A clock that goes when told, and a calendar."""

    date = 1_700_000_000.0

    def time(self) -> float:
        return self.date

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
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
    note = metrics.started()
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
    assert found["time_to_first_token_seconds_sum"] == 2.0
    # Two tokens that came together count as one observation of half the time each.
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["inter_token_latency_seconds_sum"] == 0.25 + 0.25
    assert found["request_time_per_output_token_seconds_sum"] == 0.25
    assert found["e2e_request_latency_seconds_sum"] == 2.75
    assert found["request_queue_time_seconds_sum"] == 0.5
    assert found["request_prefill_time_seconds_sum"] == 1.5
    assert found["request_decode_time_seconds_sum"] == 0.75
    assert found["request_queue_time_seconds_count"] == 1
    assert found["prompt_tokens_total"] == 7
    assert found["generation_tokens_total"] == 4
    assert found["request_prompt_tokens_bucket le=10.0"] == 1
    assert found["request_prompt_tokens_bucket le=5.0"] == 0
    assert found["request_generation_tokens_sum"] == 4
    assert found["request_success_total finished_reason=length"] == 1
    assert found["time_to_first_token_seconds_bucket le=2.5"] == 1
    assert found["time_to_first_token_seconds_bucket le=1.2"] == 0


def test_a_request_that_the_engine_refuses_counts_nothing(clock: Clock) -> None:
    metrics = Metrics("m")
    metrics.started()
    assert samples(metrics)["prompt_tokens_total"] == 0


def test_a_request_without_a_token(clock: Clock) -> None:
    metrics = Metrics("m")
    metrics.started()(GenerationOutput(request_id="a", finish_reason="cancelled"))
    found = samples(metrics)
    assert found["request_success_total finished_reason=cancelled"] == 1
    assert found["time_to_first_token_seconds_count"] == 0


VIEW = PipelineView(
    measured_at=Clock.date - 10,
    busy={"attend": 0.75, "dispatch": 0.125, "ffn": 0.5},
    bubble=0.25,
    transfers={"dispatch": Transfers(4, 0.5)},
    experts=ExpertView(imbalance=2.5),
)


def test_the_pipeline(clock: Clock) -> None:
    metrics, engine = Metrics("m"), FakeEngine([], view=VIEW)
    metrics.watch(engine)
    found = samples(metrics)
    assert found["stage_busy_fraction stage=attend"] == 0.75
    assert found["stage_busy_fraction stage=ffn"] == 0.5
    assert "stage_busy_fraction stage=combine" not in found
    assert found["bubble_fraction"] == 0.25
    assert found["transfer_seconds_sum direction=dispatch"] == 0.5
    assert found["transfer_seconds_count direction=dispatch"] == 4
    assert found["expert_imbalance"] == 2.5


def test_what_was_measured_long_ago_is_not_now(clock: Clock) -> None:
    metrics, engine = Metrics("m"), FakeEngine([], view=VIEW)
    metrics.watch(engine)
    clock.date += 51
    found = samples(metrics)
    assert not [name for name in found if name.startswith(("stage_", "bubble_"))]
    assert found["transfer_seconds_count direction=dispatch"] == 4  # a counter


def test_each_domain_has_its_figures(monkeypatch) -> None:
    engine = FakeEngine([])
    domains = [
        DomainLoad(running=3, waiting=1, kv_usage=[0.2, 0.4]),
        DomainLoad(running=5, waiting=0, kv_usage=[0.5, 0.9]),
    ]
    load = EngineLoad.of(domains, queued=2, page_size=16, pages=10, compilations=0)
    monkeypatch.setattr(engine, "load", lambda: load)
    metrics = Metrics("m")
    metrics.watch(engine)
    found = samples(metrics)
    assert found["num_requests_running"] == 8
    assert found["num_requests_waiting"] == 3
    assert found["kv_cache_usage_perc"] == 0.5
    assert found["dp_group_kv_cache_usage_perc dp_group=3"] == 0.9
    assert found["domain_running domain=0"] == 3
    assert found["domain_waiting domain=0"] == 1
    assert found["domain_running domain=1"] == 5
    assert found["domain_kv_cache_usage_perc domain=1"] == 0.7


def test_what_fleet_routers_read() -> None:
    metrics = Metrics("m")
    metrics.watch(FakeEngine([]))
    found = samples(metrics)
    assert found["num_requests_running"] == 0
    assert found["num_requests_waiting"] == 2
    assert found["kv_cache_usage_perc"] == 0.5
    assert found["dp_group_kv_cache_usage_perc dp_group=1"] == 0.75
    assert found["cache_config_info block_size=16 num_gpu_blocks=20"] == 1
    assert found["num_preemptions_total"] == 0
    assert found["prefix_cache_hits_total"] == 0


def test_the_pages_link() -> None:
    metrics = Metrics("m")
    engine = FakeEngine([5])
    pages = PagesLoad(
        transfers=3, bytes=4096, failures=1, corrupt=5, queued=2, wait_seconds=0.5, expired=4
    )
    engine.load = lambda: EngineLoad(hand_offs=pages)
    metrics.watch(engine)
    found = samples(metrics)
    names = ("transfers", "bytes", "failures", "corrupt", "wait_seconds", "expired")
    assert [found[f"hand_off_{name}_total"] for name in names] == [3, 4096, 1, 5, 0.5, 4]
    assert (found["hand_off_queued"], found["hand_off_registered_bytes"]) == (2, 0)


def test_the_workers_of_a_fleet() -> None:
    workers = [
        WorkerLoad(name="p:1", role="prefill", status="ready", held=2, pages_tokens=640),
        WorkerLoad(name="d:1", role="domain", status="absent", running=3),
    ]
    metrics = Metrics("m")
    engine = FakeEngine([5])
    engine.load = lambda: EngineLoad(workers=workers, replays=4, moves=3, refusals=5)
    metrics.watch(engine)
    found = samples(metrics)
    assert found["worker_up role=prefill worker=p:1"] == 1
    assert found["worker_up role=domain worker=d:1"] == 0
    assert found["worker_requests role=prefill state=held worker=p:1"] == 2
    assert found["worker_requests role=domain state=running worker=d:1"] == 3
    assert found["worker_handed_tokens_total role=prefill worker=p:1"] == 640
    assert "worker_handed_tokens_total role=domain worker=d:1" not in found
    assert (found["replays_total"], found["refusals_total"]) == (4, 5)
    assert found["moves_total"] == 3

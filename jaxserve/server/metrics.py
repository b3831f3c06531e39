"""Prometheus metrics of a server, with the names and meanings that vLLM gave them.

Requests are measured where their text comes out (`TextGenerator` calls `started`), in the same way
for both faces. The engine's own numbers are read at each scrape. Called by `faces.py` and the HTTP
handler of /metrics.
"""

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from jaxserve.engine.interface import StepLoop, TokenEngine
from jaxserve.engine.request import SamplingParams
from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import DraftCounts, EngineLoad
from jaxserve.observe.view import PipelineView
from jaxserve.progress import advances
from jaxserve.roles.expert_view import ExpertView
from jaxserve.text.output import GenerationOutput

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "jaxserve:"
LABEL = "model_name"

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
"""Buckets of seconds per token."""
LONG = (*SHORT[2:], 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
"""Buckets of seconds per request."""
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Buckets of tokens per request: up to 500,000."""

FRESH_SECONDS = 60.0
"""Older samples of the pipeline are not shown."""

FFN_WORKER = {
    "passes": "Passes of the ffn worker of another runtime, when last watched.",
    "messages": "Messages of these passes.",
    "rows": "Rows of these passes.",
    "left_behind": "Messages that came after their cohort had gone on.",
}
"""Counters of `FFNWorkerView`."""


class Times(NamedTuple):
    """How long something took, since the start."""

    bounds: list[float]
    """Upper ends of the buckets in seconds, ascending."""
    counts: list[int]
    """Events of each bucket, and of those beyond the last bound."""


class Counts(NamedTuple):
    """Counts of requests, in all processes with network faces together."""

    generated: int
    """Tokens."""
    refused: dict[str, int]
    """Errors of requests, by their code or reason."""
    ended: dict[str, int]
    """Requests that ended, by their reason."""
    times: dict[str, Times]
    """`first`: time to the first token; `between`: time between a request's tokens."""


class Metrics:
    """All metrics of one server, in registries of its own.

    Args:
      model: its name, which every sample carries.
      folder: where the processes of one server leave their counts for each other, by
        `prometheus_client`'s multiprocess mode; those that count have it in
        PROMETHEUS_MULTIPROC_DIR. None: this process counts alone.
    """

    def __init__(self, model: str, folder: Path | None = None):
        self._requests = CollectorRegistry(auto_describe=False)
        self._engine = CollectorRegistry(auto_describe=False)
        self._folder = folder
        self._model = model

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, [LABEL, *labels], registry=self._requests)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, [LABEL], registry=self._requests, buckets=buckets)
            return made.labels(model)

        self._first = histogram(
            "time_to_first_token_seconds", "From submission to the first token.", LONG
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between a request's tokens.", SHORT
        )
        self._each = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time between its tokens.",
            SHORT,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From submission to the last token.", LONG
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Until a request that got a token was let in.", LONG
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From being let in to the first token.", LONG
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", LONG
        )
        self._prompt_lengths = histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", TOKENS
        )
        self._lengths = histogram(
            "request_generation_tokens", "Tokens that a request generated.", TOKENS
        )
        self._responses = counter(
            "http_responses", "Responses over HTTP, by route and status.", ["path", "status"]
        )
        self._refusals = counter(
            "http_refusals", "Requests over HTTP that got an error, by its code.", ["reason"]
        )
        self._grpc_refusals = counter(
            "grpc_refusals", "RPCs that got an error, by its reason.", ["reason"]
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._generated = counter("generation_tokens", "Tokens generated.").labels(model)
        self._ended = counter(
            "request_success", "Requests that ended, by their reason.", ["finished_reason"]
        )

    def counts(self) -> "Counts":
        """Counts of all requests since the start."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self._counted().collect():
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))

        def by(name: str, label: str) -> dict[str, int]:
            found = samples.get(PREFIX + name, ())
            return {labels[label]: int(value) for labels, value in found}

        def times(name: str, bounds: Sequence[float]) -> Times:
            below = list(by(f"{name}_bucket", "le").values())
            return Times(list(bounds), [b - a for a, b in pairwise([0, *below])])

        refused = collections.Counter(by("http_refusals_total", "reason"))
        refused.update(by("grpc_refusals_total", "reason"))
        return Counts(
            sum(by("generation_tokens_total", LABEL).values()),
            dict(refused),
            by("request_success_total", "finished_reason"),
            {
                "first": times("time_to_first_token_seconds", LONG),
                "between": times("inter_token_latency_seconds", SHORT),
            },
        )

    def watch(self, engine: TokenEngine) -> None:
        """Adds the engine's own numbers, and those of the process if it is the only one."""
        if self._folder is None:
            ProcessCollector(registry=self._engine)
        self._engine.register(_EngineCollector(engine.load, engine.pipeline, self._model))

    def watch_loop(self, step_loop: StepLoop) -> None:
        """Adds the numbers of a process that serves no clients, and the engine's if it has one."""
        if isinstance(step_loop, TokenEngine):
            self.watch(step_loop)
        else:
            ProcessCollector(registry=self._engine)
        for name, text, number in (
            ("process_ready", "1 once the process is warm.", lambda: step_loop.status == "ready"),
            (
                "process_turn_age_seconds",
                "Since its step loop came round.",
                lambda: time.monotonic() - step_loop.last_turn,
            ),
            ("process_progress", "Pieces loaded and programs compiled so far.", advances),
        ):
            gauge = Gauge(PREFIX + name, text, [LABEL], registry=self._engine)
            gauge.labels(self._model).set_function(number)

    def started(self, params: SamplingParams) -> Callable[[GenerationOutput], None]:
        """Begins to measure a request; the returned function takes its outputs."""
        return _RequestClock(self).note

    def text(self) -> bytes:
        """The metrics in Prometheus' text format; the media type is CONTENT_TYPE."""
        return generate_latest(self._counted()) + generate_latest(self._engine)

    def _counted(self) -> CollectorRegistry:
        """The registry of the requests' metrics, of all processes together."""
        if self._folder is None:
            return self._requests
        together = CollectorRegistry(auto_describe=False)
        MultiProcessCollector(together, str(self._folder))
        return together

    def prompt(self, tokens: int) -> None:
        """Counts a submitted request."""
        self._prompt_tokens.inc(tokens)
        self._prompt_lengths.observe(tokens)

    def response(self, path: str, status: int, reason: str | None) -> None:
        """Counts a response over HTTP, and why it is an error if it is one."""
        self._responses.labels(self._model, path, str(status)).inc()
        if reason is not None:
            self._refusals.labels(self._model, reason).inc()

    def grpc_refusal(self, reason: str) -> None:
        """Counts an RPC that got an error."""
        self._grpc_refusals.labels(self._model, reason).inc()

    def first_token(self, seconds: float, queued: float) -> None:
        """Counts a first token: seconds since submission, of which `queued` before admission."""
        self._first.observe(seconds)
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, seconds - queued))

    def tokens(self, count: int, seconds: float | None) -> None:
        """Counts further tokens, which came `seconds` after the previous ones, if any."""
        self._generated.inc(count)
        if seconds is not None:
            self._between.observe(seconds / count)

    def ended(self, reason: str, seconds: float, decoding: float, tokens: int) -> None:
        """Counts the end of a request."""
        self._ended.labels(self._model, reason).inc()
        self._lengths.observe(tokens)
        self._whole.observe(seconds)
        self._decode.observe(decoding)
        if tokens > 1:
            self._each.observe(decoding / (tokens - 1))


class _RequestClock:
    """Measures the times of one request."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None

    def note(self, output: GenerationOutput) -> None:
        """Takes an output."""
        now = time.monotonic()
        if self._last is None:
            self._last = now
            self._metrics.prompt(output.prompt_token_count)
        count = len(output.token_ids)
        if count:
            if self._first is None:
                self._first = now
                self._metrics.first_token(now - self._start, output.queue_seconds)
                self._metrics.tokens(count, None)
            else:
                self._metrics.tokens(count, now - self._last)
            self._last = now
        if output.finish_reason is not None:
            decoding = 0.0 if self._first is None else self._last - self._first
            tokens = output.completion_token_count
            self._metrics.ended(output.finish_reason, now - self._start, decoding, tokens)


class _EngineCollector(Collector):
    """Reads the engine's numbers at a scrape."""

    def __init__(
        self, load: Callable[[], EngineLoad], pipeline: Callable[[], PipelineView], model: str
    ):
        self._load = load
        self._pipeline = pipeline
        self._model = model

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        usage = sum(load.kv_usage) / max(1, len(load.kv_usage))
        yield self._gauge("num_requests_running", "Sequences that get steps.", load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", load.waiting)
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", usage)
        groups = GaugeMetricFamily(
            PREFIX + "dp_group_kv_cache_usage_perc",
            "Used part of the KV cache of a DP group, 0 to 1.",
            labels=[LABEL, "dp_group"],
        )
        for number, part in enumerate(load.kv_usage):
            groups.add_metric([self._model, str(number)], part)
        yield groups
        yield from self._domain_metrics(load)
        pages = load.pages * len(load.kv_usage)
        config = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Tokens a KV page, and pages of all DP groups.",
            labels=[LABEL, "block_size", "num_gpu_blocks"],
        )
        config.add_metric([self._model, str(load.page_size), str(pages)], 1)
        yield config
        yield self._counter("num_preemptions", "Sequences that lost pages.", load.preemptions)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked for.", load.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", load.prefix_hits)
        yield self._counter(
            "invalid_logits", "Requests whose logits were not finite.", load.invalid_logits
        )
        yield self._counter(
            "recomputed", "Requests whose KV cache was made anew on other pages.", load.recomputed
        )
        quarantined = GaugeMetricFamily(
            PREFIX + "quarantined_pages", "KV pages kept away for that.", labels=[LABEL]
        )
        quarantined.add_metric([self._model], load.quarantined)
        yield quarantined
        yield self._counter(
            "compilations_after_ready", "Programs that steps waited for.", load.compilations
        )
        if load.drafts is not None:
            yield from self._draft_metrics(load.drafts)
        problems = GaugeMetricFamily(
            PREFIX + "problems",
            "Workers that this process needs and that are absent, suspect or unwell.",
            labels=[LABEL],
        )
        problems.add_metric([self._model], len(load.problems))
        yield problems
        if load.workers:
            yield from self._fleet_metrics(load)
        if load.hand_offs is not None:
            yield from self._hand_off_metrics(load.hand_offs)
        yield from self._pipeline_metrics(self._pipeline())

    def _draft_metrics(self, drafts: DraftCounts) -> Iterator[Metric]:
        yield self._counter(
            "spec_decode_num_drafts", "How often drafts of a sequence were verified.", drafts.runs
        )
        yield self._counter(
            "spec_decode_num_draft_tokens", "Drafts that were verified.", drafts.drafted
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Drafts that held.", sum(drafts.accepted)
        )
        places = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that held, by their place.",
            labels=[LABEL, "position"],
        )
        for place, count in enumerate(drafts.accepted):
            places.add_metric([self._model, str(place)], count)
        yield places

    def _hand_off_metrics(self, pages: PagesLoad) -> Iterator[Metric]:
        """Metrics of a worker's end of the pages link."""
        for name, text, count in (
            ("transfers", "Hand-offs of KV pages that came or were taken whole.", pages.transfers),
            ("bytes", "Bytes of hand-offs.", pages.bytes),
            ("failures", "Hand-offs that failed.", pages.failures),
            ("corrupt", "Pieces whose checksum was wrong: fetched again.", pages.corrupt),
            ("wait_seconds", "From order to last piece, summed.", pages.wait_seconds),
            ("expired", "Leases that ran out.", pages.expired),
        ):
            yield self._counter(f"hand_off_{name}", text, count)
        for name, text, value in (
            ("queued", "Hand-offs that have not ended.", pages.queued),
            ("registered_bytes", "Bytes that wait to be pulled.", pages.registered_bytes),
        ):
            gauge = GaugeMetricFamily(PREFIX + f"hand_off_{name}", text, labels=[LABEL])
            gauge.add_metric([self._model], value)
            yield gauge

    def _fleet_metrics(self, load: EngineLoad) -> Iterator[Metric]:
        """Metrics of a router's workers, by role."""
        labels = [LABEL, "role", "worker"]
        up = GaugeMetricFamily(PREFIX + "worker_up", "Whether a worker is ready.", labels=labels)
        requests = GaugeMetricFamily(
            PREFIX + "worker_requests",
            "Requests of a worker; held: those whose KV pages it keeps for a domain.",
            labels=[*labels, "state"],
        )
        pages = CounterMetricFamily(
            PREFIX + "worker_handed_tokens",
            "Tokens whose KV pages a prefill worker handed over for this router.",
            labels=labels,
        )
        for worker in load.workers:
            whose = [self._model, worker.role, worker.name]
            up.add_metric(whose, worker.status == "ready")
            for state in ("running", "waiting", "held"):
                requests.add_metric([*whose, state], getattr(worker, state))
            if worker.role == "prefill":
                pages.add_metric(whose, worker.pages_tokens)
        yield up
        yield requests
        yield pages
        losses = CounterMetricFamily(
            PREFIX + "worker_losses",
            "Workers that were there and were given up: closed, silent, stuck, failed or unread.",
            labels=[LABEL, "role", "cause"],
        )
        for role, causes in load.losses.items():
            for cause, count in causes.items():
                losses.add_metric([self._model, role, cause], count)
        yield losses
        yield self._counter("replays", "Requests that lost their worker.", load.replays)
        yield self._counter("moves", "Requests that left a worker that drains.", load.moves)
        yield self._counter("refusals", "Requests for which there was no room.", load.refusals)

    def _domain_metrics(self, load: EngineLoad) -> Iterator[Metric]:
        """Metrics of the load of each domain of the runtime."""
        for name, text, value in (
            ("running", "Sequences of a domain that get steps.", lambda d: d.running),
            ("waiting", "Requests that wait in a domain.", lambda d: d.waiting),
            (
                "kv_cache_usage_perc",
                "Used part of a domain's KV cache, 0 to 1.",
                lambda d: sum(d.kv_usage) / max(1, len(d.kv_usage)),
            ),
        ):
            family = GaugeMetricFamily(f"{PREFIX}domain_{name}", text, labels=[LABEL, "domain"])
            for number, domain in enumerate(load.domains):
                family.add_metric([self._model, str(number)], value(domain))
            yield family

    def _pipeline_metrics(self, view: PipelineView) -> Iterator[Metric]:
        """Metrics of the steps measured last; without samples if these are not recent."""
        lately = view.measured_at is not None and time.time() - view.measured_at < FRESH_SECONDS
        busy = GaugeMetricFamily(
            PREFIX + "stage_busy_fraction",
            "Share of the time in which a stage ran, in the steps sampled last.",
            labels=[LABEL, "stage"],
        )
        for stage, share in view.busy.items() if lately else ():
            busy.add_metric([self._model, stage], share)
        yield busy
        yield self._gauge(
            "bubble_fraction",
            "1 - the busier side's share, in the steps sampled last.",
            view.bubble if lately else None,
        )
        transfers = SummaryMetricFamily(
            PREFIX + "transfer_seconds",
            "Transfers between attention and ffn, of the steps sampled.",
            labels=[LABEL, "direction"],
        )
        for stage, (count, seconds) in view.transfers.items():
            transfers.add_metric([self._model, stage], count_value=count, sum_value=seconds)
        yield transfers
        for name, text in FFN_WORKER.items() if view.ffn else ():
            total = sum(getattr(worker, name) for worker in view.ffn)
            yield self._counter(f"ffn_worker_{name}", text, total)
        if view.ffn:
            misjudged = max(worker.misjudged for worker in view.ffn)
            text = "Between predicted and real arrivals of messages at the ffn worker, mean."
            yield self._gauge("ffn_worker_misjudged_seconds", text, misjudged)
        if view.experts is not None:
            yield from self._expert_metrics(view.experts)

    def _expert_metrics(self, experts: ExpertView) -> Iterator[Metric]:
        """Metrics of experts that move, counted all the time."""
        yield self._gauge(
            "expert_imbalance",
            "Busiest expert's tokens over the mean, mean over layers, in the last window.",
            experts.imbalance,
        )
        yield self._gauge(
            "expert_balance",
            "Mean over max tokens of a rank, mean over layers, in the last window.",
            experts.balance,
        )
        yield self._gauge("expert_rounds_to_come", "Rounds of moves under way.", experts.moving)
        yield self._gauge(
            "expert_epoch_age_seconds", "Since experts moved last.", experts.epoch_seconds
        )
        yield self._counter("expert_epochs", "Rebalances that were finished.", experts.epoch)
        yield self._counter("expert_moves", "Experts that were copied.", experts.moves)
        yield self._counter("expert_move_bytes", "Bytes of those.", experts.move_bytes)

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        """A gauge; without a sample for None."""
        metric = GaugeMetricFamily(PREFIX + name, text, labels=[LABEL])
        if value is not None:
            metric.add_metric([self._model], value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(PREFIX + name, text, labels=[LABEL])
        metric.add_metric([self._model], value)
        return metric

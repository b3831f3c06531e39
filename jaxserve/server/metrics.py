"""Prometheus metrics of a server: names, types and meanings that fleet routers know from vLLM.

Requests are measured where their text comes out (`TextGenerator` calls `started`), so both faces
and their clients' view count the same. What the engine knows itself is read when somebody asks.
Called by `serve.py` and the HTTP handler of /metrics.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from jaxserve.engine.load import EngineLoad
from jaxserve.engine.view import PipelineView
from jaxserve.server.output import GenerationOutput
from jaxserve.server.token_engine import TokenEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "jaxserve:"
LABEL = "model_name"

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
"""Buckets of times a token, in seconds."""
LONG = (*SHORT[2:], 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
"""Buckets of times a request."""


FRESH_SECONDS = 60.0
"""How long what was measured of the pipeline is shown: then it is history."""


class Metrics:
    """Everything that one server measures, in a registry of its own."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, [LABEL, *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, [LABEL], registry=self.registry, buckets=buckets)
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
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._generated = counter("generation_tokens", "Tokens generated.").labels(model)
        self._ended = counter(
            "request_success", "Requests that ended, by their reason.", ["finished_reason"]
        )
        self.generated = 0
        """Tokens so far."""

    def watch(self, engine: TokenEngine) -> None:
        """Shows the engine's own numbers from now on."""
        self.registry.register(_EngineCollector(engine.load, engine.pipeline, self._model))

    def started(self) -> Callable[[GenerationOutput], None]:
        """Measures a request that is submitted now; what is returned takes its outputs."""
        return _RequestClock(self).note

    def text(self) -> bytes:
        """The exposition; its media type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    def prompt(self, tokens: int) -> None:
        """A request was taken."""
        self._prompt_tokens.inc(tokens)

    def first_token(self, seconds: float, queued: float) -> None:
        """A request has its first token, so long after it was submitted, and waited before."""
        self._first.observe(seconds)
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, seconds - queued))

    def tokens(self, count: int, seconds: float | None) -> None:
        """A request has more tokens; `seconds` after the last ones, if it had any."""
        self._generated.inc(count)
        self.generated += count
        if seconds is not None:
            self._between.observe(seconds / count)

    def ended(self, reason: str, seconds: float, decoding: float, tokens: int) -> None:
        """A request has ended."""
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        self._decode.observe(decoding)
        if tokens > 1:
            self._each.observe(decoding / (tokens - 1))


class _RequestClock:
    """The times of one request."""

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
    """The engine's numbers at the time of a scrape."""

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
            "compilations_after_ready", "Programs that steps waited for.", load.compilations
        )
        yield from self._pipeline_metrics(self._pipeline())

    def _pipeline_metrics(self, view: PipelineView) -> Iterator[Metric]:
        """Of the steps measured last; without samples where none were lately, or not all of it."""
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
        yield self._gauge(
            "expert_imbalance",
            "Busiest expert's tokens over the mean, mean over layers, of the steps sampled.",
            view.imbalance if lately else None,
        )

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        """Without a sample where there is no value."""
        metric = GaugeMetricFamily(PREFIX + name, text, labels=[LABEL])
        if value is not None:
            metric.add_metric([self._model], value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(PREFIX + name, text, labels=[LABEL])
        metric.add_metric([self._model], value)
        return metric

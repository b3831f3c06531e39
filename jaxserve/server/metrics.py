"""Prometheus metrics of a server, with the names and meanings that vLLM gave them.

Requests are measured where their text comes out (`TextGenerator` calls `started`), in the same way
for both faces. The engine's own numbers are read at each scrape. Called by `faces.py` and the HTTP
handler of /metrics.
"""

import collections
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.engine.request import SamplingParams
from jaxserve.progress import advances
from jaxserve.server.engine_metrics import LABEL, PREFIX, EngineCollector
from jaxserve.text.output import GenerationOutput, StepLoop, TokenEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
"""Buckets of seconds per token."""
LONG = (*SHORT[2:], 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)
"""Buckets of seconds per request."""
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Buckets of tokens per request: up to 500,000."""


HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission to the first token.", LONG),
    "inter_token_latency_seconds": ("Between a request's tokens.", SHORT),
    "request_time_per_output_token_seconds": ("A request's mean time between its tokens.", SHORT),
    "e2e_request_latency_seconds": ("From submission to the last token.", LONG),
    "request_queue_time_seconds": ("Until a request that got a token was let in.", LONG),
    "request_prefill_time_seconds": ("From being let in to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
    "request_prompt_tokens": ("Tokens of a request's prompt.", TOKENS),
    "request_generation_tokens": ("Tokens that a request generated.", TOKENS),
}
"""Name → text and buckets; one sample a request, but for `inter_token_latency_seconds`."""


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

        self._histograms = {name: histogram(name, *of) for name, of in HISTOGRAMS.items()}
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
        self._engine.register(EngineCollector(engine.load, engine.pipeline, self._model))

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

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def prompt(self, tokens: int) -> None:
        """Counts a submitted request."""
        self._prompt_tokens.inc(tokens)
        self._observe("request_prompt_tokens", tokens)

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
        self._observe("time_to_first_token_seconds", seconds)
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", max(0.0, seconds - queued))

    def tokens(self, count: int, seconds: float | None) -> None:
        """Counts further tokens, which came `seconds` after the previous ones, if any."""
        self._generated.inc(count)
        if seconds is not None:
            self._observe("inter_token_latency_seconds", seconds / count)

    def ended(self, reason: str, seconds: float, decoding: float, tokens: int) -> None:
        """Counts the end of a request."""
        self._ended.labels(self._model, reason).inc()
        self._observe("request_generation_tokens", tokens)
        self._observe("e2e_request_latency_seconds", seconds)
        self._observe("request_decode_time_seconds", decoding)
        if tokens > 1:
            self._observe("request_time_per_output_token_seconds", decoding / (tokens - 1))


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

"""Traces of requests for an OpenTelemetry collector (`server.traces`).

A request of a client is a span of the front end, under the `traceparent` that its client sent. Each
process that runs a part of the request adds spans of its own under that one: `queue`, `hand-off`
(KV pages on their way from a prefill worker), `prefill` and `decode`. Workers learn of the trace by
`SamplingParams.trace`, or a prefill worker by its order. Names are those of OpenTelemetry's
conventions for generative AI. Without the key nothing here is imported or called.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jaxserve
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import ConfigError
from jaxserve.link.pages.source import PagesSource
from jaxserve.text.output import GenerationOutput

if TYPE_CHECKING:
    from opentelemetry.trace import Span

REQUEST_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty"),
)
"""Sampling parameters that are attributes of a request's span, `gen_ai.request.NAME`."""


class Tracing:
    """Makes the spans of one process, and sends them from a thread of its own.

    OpenTelemetry's environment variables hold: `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`.

    Args:
      collector: URL of an OTLP receiver over HTTP, without the path `/v1/traces`.
      role: what the process is for: "front", "prefill" or "domain".
      instance: names the process among all; empty: host and process id.

    Raises:
      ConfigError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, collector: str, role: str, instance: str = ""):
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"server.traces: {error}; pip install 'jaxserve[tracing]' brings it"
            ) from None
        self._trace, self._propagate = trace, propagate
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "jaxserve"),
                "service.version": jaxserve.__version__,
                "service.instance.id": instance or f"{socket.gethostname()}:{os.getpid()}",
                "jaxserve.role": role,
            }
        )
        self._provider = provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{collector.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("jaxserve", jaxserve.__version__)
        self._open: dict[str, list[GenerationOutput]] = {}

    @contextlib.contextmanager
    def answering(
        self,
        params: SamplingParams,
        choices: int,
        headers: Mapping[str, str],
        operation: str,
        model: str,
    ) -> Iterator[str]:
        """The span of a client's request, from its submission to the last byte of the answer.

        Args:
          params: of its first choice.
          headers: of the request, with lower-case names.
          operation: `chat` or `text_completion`.
          model: its name.

        Yields:
          `SamplingParams.trace` of the choices; empty: the request is not sampled.
        """
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": choices,
        }
        for name in REQUEST_FIELDS:
            if (value := getattr(params, name)) is not None:
                attributes[f"gen_ai.request.{name}"] = value
        with self._tracer.start_as_current_span(
            f"{operation} {model}",
            self._propagate.extract(headers),
            self._trace.SpanKind.SERVER,
            attributes,
            record_exception=False,
        ) as span:
            carrier: dict[str, str] = {}
            self._propagate.inject(carrier)
            if not span.is_recording():
                yield ""
                return
            trace = carrier["traceparent"]
            ended = self._open[trace] = []
            try:
                yield trace
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                raise
            finally:
                del self._open[trace]
                span.set_attributes(_totals(ended) if ended else {})

    def observing(
        self,
        started: Callable[[SamplingParams], Callable[[GenerationOutput], None]],
        runs_here: bool,
    ) -> Callable[[SamplingParams], Callable[[GenerationOutput], None]]:
        """An observer of requests for `TextGenerator` that traces them, too.

        Args:
          started: observes every request; see `Metrics.started`.
          runs_here: whether this process runs them, rather than workers.
        """

        def observe(params: SamplingParams) -> Callable[[GenerationOutput], None]:
            note = started(params)
            ended = self._open.get(params.trace)
            if ended is None:
                return note
            spans = self.worker(params.trace) if runs_here else None

            def both(output: GenerationOutput) -> None:
                note(output)
                if output.finish_reason is not None:
                    ended.append(output)
                if spans is not None:
                    prompt, cached = output.prompt_token_count, output.cached_token_count
                    spans.note(output, prompt, cached)

            return both

        return observe

    def worker(self, trace: str) -> "WorkerSpans":
        """Begins the spans of a request that this process runs, under a `traceparent`."""
        return WorkerSpans(self._tracer, self._propagate.extract({"traceparent": trace}))

    def close(self) -> None:
        """Sends the spans that have ended, within `OTEL_EXPORTER_OTLP_TIMEOUT` (10 seconds)."""
        self._provider.shutdown()


def _totals(ended: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Attributes of a request's span, from the last outputs of its choices."""
    return {
        "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in ended],
        "gen_ai.usage.input_tokens": max(one.prompt_token_count for one in ended),
        "gen_ai.usage.cache_read.input_tokens": max(one.cached_token_count for one in ended),
        "gen_ai.usage.output_tokens": sum(one.completion_token_count for one in ended),
    }


class WorkerSpans:
    """The spans of one request in the process that runs it; its times come with the outputs."""

    def __init__(self, tracer: Any, parent: Any):
        self._tracer, self._parent = tracer, parent
        self._at = time.time_ns()
        self._tokens = 0

    def note(self, output: TokenOutput | GenerationOutput, prompt: int, cached: int) -> None:
        """Takes an output: the first with a token ends queue, hand-off and prefill, the last one
        ends decoding.

        Args:
          prompt: tokens of the prompt.
          cached: tokens of it that were in the prefix cache.
        """
        if output.token_ids and not self._tokens:
            self._end("queue", output.queue_seconds)
            if isinstance(output, TokenOutput) and output.hand_off_seconds:
                self._end("hand-off", output.hand_off_seconds)
            usage = {"gen_ai.usage.input_tokens": prompt}
            self._end("prefill", None, usage | {"gen_ai.usage.cache_read.input_tokens": cached})
        self._tokens += len(output.token_ids)
        if output.finish_reason is not None:
            name = "decode" if self._tokens else "queue"
            failed = output.finish_reason in ("error", "cancelled")
            reason = {"error.type": output.finish_reason} if failed else {}
            self._end(name, None, {"gen_ai.usage.output_tokens": self._tokens, **reason})

    def held(self, source: PagesSource | None) -> None:
        """Takes the end of a prompt that was computed for a domain; None: it failed."""
        if source is None:
            self._end("prefill", None, {"error.type": "refused"})
            return
        self._end("queue", source.queue_seconds)
        usage = {"gen_ai.usage.input_tokens": source.tokens}
        self._end("prefill", None, usage | {"gen_ai.usage.cache_read.input_tokens": source.cached})

    def _end(self, name: str, seconds: float | None, attributes: Mapping[str, Any] = {}) -> None:
        """Makes a span of the last `seconds` behind the span before it; None: until now."""
        start, now = self._at, time.time_ns()
        self._at = now if seconds is None else min(now, start + int(1e9 * seconds))
        span: Span = self._tracer.start_span(
            name, self._parent, attributes=attributes, start_time=start
        )
        span.end(self._at)

"""Prometheus metrics of an engine or a fleet, read anew at each scrape.

Called by `metrics.py`, which counts requests.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import DraftCounts, EngineLoad
from jaxserve.observe.view import PipelineView
from jaxserve.roles.expert_view import ExpertView

PREFIX = "jaxserve:"
LABEL = "model_name"

FRESH_SECONDS = 60.0
"""Older samples of the pipeline are not shown."""

FFN_WORKER = {
    "passes": "Passes of the ffn worker of another runtime, when last watched.",
    "messages": "Messages of these passes.",
    "rows": "Rows of these passes.",
    "left_behind": "Messages that came after their cohort had gone on.",
}
"""Counters of `FFNWorkerView`."""


HOST_PAGES = {
    "queries": "KV pages looked for in host memory.",
    "hits": "KV pages found in host memory.",
    "saved": "Evicted KV pages that were copied to host memory.",
    "lost": "Evicted KV pages that were not copied: too many at a time, or the device failed.",
    "bytes_saved": "Bytes copied to host memory.",
    "bytes_restored": "Bytes copied back to the device.",
    "save_seconds": "From eviction to host memory, summed over reads.",
    "restore_seconds": "From admission until all pages are back, summed over requests.",
}
"""Counters of `EngineLoad.host_pages`."""


class EngineCollector(Collector):
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
        for name, text in HOST_PAGES.items() if load.host_pages else ():
            yield self._counter(f"host_pages_{name}", text, load.host_pages[name])
        if load.host_pages:
            text = "Bytes of KV pages in host memory."
            yield self._gauge("host_pages_held_bytes", text, load.host_pages["held_bytes"])
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

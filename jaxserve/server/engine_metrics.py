"""Prometheus metrics of an engine or a fleet, read anew at each scrape.

Called by `metrics.py`, which counts requests.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

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
    "places": "Most messages that these passes could have had: one of each domain.",
    "left_behind": "Messages that came after their cohort had gone on.",
}
"""Counters of `FFNWorkerView`."""
HANDED_OFF = {
    "transfers": "Hand-offs of KV pages that came or were taken whole.",
    "bytes": "Bytes of hand-offs.",
    "failures": "Hand-offs that failed.",
    "corrupt": "Pieces whose checksum was wrong: fetched again.",
    "wait_seconds": "From order to last piece, summed.",
    "expired": "Leases that ran out.",
}
"""Counters of `PagesLoad`."""
HOST_PAGES = {
    "queries": "KV pages looked for in host memory.",
    "hits": "KV pages found in host memory.",
    "saved": "KV pages that were copied to host memory.",
    "lost": "KV pages that were not copied: too many at a time, or the device failed.",
    "bytes_saved": "Bytes copied to host memory.",
    "bytes_restored": "Bytes copied back to the device.",
    "save_seconds": "From eviction to host memory, summed over reads.",
    "restore_seconds": "From admission until all pages are back, summed over requests.",
    "storage_hits": "KV pages found in the folder alone (cache.storage).",
    "storage_errors": "Reads, writes and lists of the folder that failed; damaged files.",
    "storage_bytes_read": "Bytes read from the folder.",
    "storage_bytes_written": "Bytes written to the folder.",
    "prefetched": "KV pages read from the folder while their request waited.",
    "prefetched_bytes": "Bytes of these pages.",
    "prefetch_seconds": "From the decision until the last of them is read, summed over requests.",
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
        yield self._gauge("num_requests_running", "Sequences that get steps.", load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", load.waiting)
        text = "Used part of the KV cache, 0 to 1."
        yield self._gauge("kv_cache_usage_perc", text, _mean(load.kv_usage))
        name, text = (
            "dp_group_kv_cache_usage_perc",
            "Used part of the KV cache of a DP group, 0 to 1.",
        )
        yield self._family(Gauge, name, text, ["dp_group"], enumerate(load.kv_usage))
        for name, text, domain_value in (
            ("running", "Sequences of a domain that get steps.", lambda d: d.running),
            ("waiting", "Requests that wait in a domain.", lambda d: d.waiting),
            (
                "kv_cache_usage_perc",
                "Used part of a domain's KV cache, 0 to 1.",
                lambda d: _mean(d.kv_usage),
            ),
        ):
            values = enumerate(map(domain_value, load.domains))
            yield self._family(Gauge, f"domain_{name}", text, ["domain"], values)
        text = "Tokens a KV page, and pages of all DP groups."
        sizes = [(load.page_size, load.pages * len(load.kv_usage), 1)]
        yield self._family(
            Gauge, "cache_config_info", text, ["block_size", "num_gpu_blocks"], sizes
        )
        yield self._counter("num_preemptions", "Sequences that lost pages.", load.preemptions)
        text = "Prompt tokens looked for."
        yield self._counter("prefix_cache_queries", text, load.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", load.prefix_hits)
        text = "Requests whose logits were not finite."
        yield self._counter("invalid_logits", text, load.invalid_logits)
        text = "Requests whose KV cache was made anew on other pages."
        yield self._counter("recomputed", text, load.recomputed)
        yield self._gauge("quarantined_pages", "KV pages kept away for that.", load.quarantined)
        text = "Programs that steps waited for."
        yield self._counter("compilations_after_ready", text, load.compilations)
        if load.drafts is not None:
            yield from self._draft_metrics(load.drafts)
        text = "Workers that this process needs and that are absent, suspect or unwell."
        yield self._gauge("problems", text, len(load.problems))
        if load.workers:
            yield from self._fleet_metrics(load)
        if (pages := load.hand_offs) is not None:
            for name, text in HANDED_OFF.items():
                yield self._counter(f"hand_off_{name}", text, getattr(pages, name))
            yield self._gauge("hand_off_queued", "Hand-offs that have not ended.", pages.queued)
            text = "Bytes that wait to be pulled."
            yield self._gauge("hand_off_registered_bytes", text, pages.registered_bytes)
        for name, text in HOST_PAGES.items() if load.host_pages else ():
            yield self._counter(f"host_pages_{name}", text, load.host_pages[name])
        if load.host_pages:
            text = "Bytes of KV pages in host memory."
            yield self._gauge("host_pages_held_bytes", text, load.host_pages["held_bytes"])
        yield from self._pipeline_metrics(self._pipeline())

    def _draft_metrics(self, drafts: DraftCounts) -> Iterator[Metric]:
        text = "How often drafts of a sequence were verified."
        yield self._counter("spec_decode_num_drafts", text, drafts.runs)
        text = "Drafts that were verified."
        yield self._counter("spec_decode_num_draft_tokens", text, drafts.drafted)
        name = "spec_decode_num_accepted_tokens"
        yield self._counter(name, "Drafts that held.", sum(drafts.accepted))
        places, text = enumerate(drafts.accepted), "Drafts that held, by their place."
        yield self._family(Count, f"{name}_per_pos", text, ["position"], places)

    def _fleet_metrics(self, load: EngineLoad) -> Iterator[Metric]:
        """Metrics of a router's workers, by role."""
        known = [(worker, worker.role, worker.name) for worker in load.workers]
        labels = ["role", "worker"]
        ready = [(*whose, worker.status == "ready") for worker, *whose in known]
        yield self._family(Gauge, "worker_up", "Whether a worker is ready.", labels, ready)
        text = "Requests of a worker; held: those whose KV pages it keeps for a domain."
        requests = [
            (*whose, state, getattr(worker, state))
            for worker, *whose in known
            for state in ("running", "waiting", "held")
        ]
        yield self._family(Gauge, "worker_requests", text, [*labels, "state"], requests)
        text = "Tokens whose KV pages a prefill worker handed over for this router."
        handed = [(*whose, one.pages_tokens) for one, *whose in known if one.role == "prefill"]
        yield self._family(Count, "worker_handed_tokens", text, labels, handed)
        text = "Workers that were there and were given up: closed, silent, stuck, failed or unread."
        losses = [(role, *one) for role, causes in load.losses.items() for one in causes.items()]
        yield self._family(Count, "worker_losses", text, ["role", "cause"], losses)
        yield self._counter("replays", "Requests that lost their worker.", load.replays)
        yield self._counter(
            "moves",
            "Requests that left a worker that drains, or that is not for such long ones.",
            load.moves,
        )
        yield self._counter("refusals", "Requests for which there was no room.", load.refusals)

    def _pipeline_metrics(self, view: PipelineView) -> Iterator[Metric]:
        """Metrics of the steps measured last; without samples if these are not recent."""
        lately = view.measured_at is not None and time.time() - view.measured_at < FRESH_SECONDS
        text = "Share of the time in which a stage ran, in the steps sampled last."
        busy = view.busy.items() if lately else ()
        yield self._family(Gauge, "stage_busy_fraction", text, ["stage"], busy)
        text = "1 - the busier side's share, in the steps sampled last."
        yield self._gauge("bubble_fraction", text, view.bubble if lately else None)
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
        text = "Busiest expert's tokens over the mean, mean over layers, in the last window."
        yield self._gauge("expert_imbalance", text, experts.imbalance)
        text = "Mean over max tokens of a rank, mean over layers, in the last window."
        yield self._gauge("expert_balance", text, experts.balance)
        yield self._gauge("expert_rounds_to_come", "Rounds of moves under way.", experts.moving)
        text = "Since experts moved last."
        yield self._gauge("expert_epoch_age_seconds", text, experts.epoch_seconds)
        yield self._counter("expert_epochs", "Rebalances that were finished.", experts.epoch)
        yield self._counter("expert_moves", "Experts that were copied.", experts.moves)
        yield self._counter("expert_move_bytes", "Bytes of those.", experts.move_bytes)

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        """Returns a gauge; without a sample for None."""
        return self._family(Gauge, name, text, (), [] if value is None else [(value,)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(Count, name, text, (), [(value,)])

    def _family(
        self,
        kind: type[Gauge] | type[Count],
        name: str,
        text: str,
        labels: Sequence[str],
        samples: Iterable[Sequence[Any]],
    ) -> Metric:
        """Returns a metric; each sample has the values of the labels, then its number."""
        family = kind(PREFIX + name, text, labels=[LABEL, *labels])
        for *whose, value in samples:
            family.add_metric([self._model, *map(str, whose)], value)
        return family


def _mean(parts: Sequence[float]) -> float:
    return sum(parts) / max(1, len(parts))

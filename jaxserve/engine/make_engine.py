"""Puts an engine around a runtime, and makes it warm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from jaxserve.checkpoint.store import open_folder
from jaxserve.config.deployment import Deployment
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.engine.engine import Engine, Explain
from jaxserve.engine.first_token import start_checked
from jaxserve.engine.runtime import BuildRuntime, Runtime, warm_up
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.stepper import Broadcast, Driver
from jaxserve.observe.probe import Probe
from jaxserve.observe.watch import Collect, Watch
from jaxserve.roles.expert_moves import MovesExperts, ReadCounts
from jaxserve.roles.weights import OpenSource
from jaxserve.roles.worker import Observer


def warm_engine(
    deployment: Deployment,
    build: BuildRuntime,
    *,
    observer: Observer | None = None,
    broadcast: Broadcast | None = None,
    explain: Explain | None = None,
    meet: Callable[[], None] = lambda: None,
    collect: Collect | None = None,
    counts: ReadCounts | None = None,
    prepare: Callable[[Engine], object] = lambda engine: None,
    open_source: OpenSource = open_folder,
) -> Engine:
    """A warm engine; with `broadcast` the leader of several processes, not yet started.

    Args:
      build: makes its runtime.
      meet: called before the first step, which takes all processes: it waits for them.
      prepare: called before the engine is started.
    """
    ends = read_special_tokens(deployment.model).eos
    runtime = build(deployment, observer=observer, open_source=open_source)
    meet()
    warm_up(runtime)
    engine = make_engine(
        runtime,
        broadcast=broadcast,
        explain=explain,
        collect=collect,
        counts=counts,
        eos_token_ids=ends,
    )
    prepare(engine)
    if broadcast is None:
        start_checked(engine)
    return engine


def make_engine(
    runtime: Runtime,
    *,
    broadcast: Broadcast | None = None,
    explain: Explain | None = None,
    collect: Collect | None = None,
    counts: ReadCounts | None = None,
    experts: MovesExperts | None = None,
    eos_token_ids: frozenset[int],
) -> Engine:
    """An engine around a runtime.

    Args:
      experts: moves those of another runtime; None: they are this one's, if there are any.
    """
    deployment, limits = runtime.deployment, runtime.deployment.scheduler
    tokens = sorted({bucket.tokens for bucket in runtime.buckets})
    domains = deployment.runtime_domains
    schedulers = [
        Scheduler(
            groups=deployment.attention.dp,
            lanes=deployment.lanes,
            slots=limits.slots,
            pages=deployment.cache.pages,
            page_size=deployment.cache.page_size,
            max_length=limits.max_length,
            token_budget=tokens[-1],
            token_buckets=tokens,
            page_buckets=limits.page_buckets,
            max_waiting=limits.max_waiting,
            prefill_tokens=limits.prefill_tokens,
            prefix_cache=deployment.cache.prefix,
            side_by_side=deployment.topology.has("ffn"),
            drafts=deployment.drafts,
            modules=deployment.modules,
            automatic_drafts=deployment.speculative.automatic,
        )
        for _ in range(domains)
    ]
    return Engine(
        deployment,
        schedulers,
        cast(Driver, runtime.driver),  # The leader plays the attention role.
        vocab=runtime.config.vocab,
        eos_token_ids=eos_token_ids,
        broadcast=broadcast,
        explain=explain,
        info=_info(runtime),
        watch=Watch(Probe(runtime.driver), domains * deployment.lanes, collect, domains=domains),
        experts=experts or runtime.make_balancer(counts),
    )


def _info(runtime: Runtime) -> dict[str, Any]:
    deployment = runtime.deployment
    return {
        "model": Path(deployment.model).name,
        "mode": deployment.mode,
        "dtype": deployment.dtype,
        "layers": runtime.config.layers,
        "vocab_size": runtime.config.vocab,
        "max_length": deployment.scheduler.max_length,
        "attention": f"dp {deployment.attention.dp} x tp {deployment.attention.tp}",
        "ffn": f"ep {deployment.ffn.ep} x tp {deployment.ffn.tp}",
        "lanes": deployment.lanes,
        "domains": deployment.runtime_domains,
    }

"""From a deployment to an engine that is warm: discover, mesh, load, compile, warm up.

Called by `llm.py`, `serve.py` and the bench on the leader, and by `fleet` on followers, which get
the same driver without an engine around it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import msgspec

from jaxserve.checkpoint.hf import read_config
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.store import open_checkpoint
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.engine.engine import Engine, Explain
from jaxserve.engine.garbage import freeze
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.stepper import Broadcast, Driver
from jaxserve.mesh import Role, Submeshes, memory_limit
from jaxserve.model.blocks import ModelTemplates
from jaxserve.observe.probe import Probe
from jaxserve.observe.watch import Collect, Watch
from jaxserve.roles.capacity import check_capacity, deployment_buckets, memory_of
from jaxserve.roles.cell import Cell, build_cell
from jaxserve.roles.colocated import ColocatedWorker, build_colocated
from jaxserve.roles.expert_balancer import (
    ExpertFacts,
    MovesExperts,
    ReadCounts,
    expert_facts,
    make_balancer,
)
from jaxserve.roles.layout import FROM_DEVICE, Bucket
from jaxserve.roles.program_cache import use_compilation_cache
from jaxserve.roles.step_plan import SaidTokens, SequenceRow, SlotRules, StepPlan, plan_of_rows
from jaxserve.roles.weights import LeafSource
from jaxserve.roles.worker import Observer
from pallas_kernels.coverage import refuse_fallbacks

logger = logging.getLogger(__name__)

OpenSource = Callable[[Deployment, CheckpointNames], LeafSource]
"""Where a deployment's weights come from: `open_folder`, or `checkpoint.peer.open_weights`."""


def open_folder(deployment: Deployment, names: CheckpointNames) -> LeafSource:
    """The deployment's model folder, even with `weights.peers`: what several processes quantise is
    so by all of them together, and none may go another way. Raises as `open_checkpoint`."""
    if deployment.weights.peers:
        logger.warning("weights: from storage: weights.peers is for workers of one process")
    return open_checkpoint(deployment.model, names)


class Runtime(NamedTuple):
    """A driver with its programs loaded and compiled, and what it was made from."""

    deployment: Deployment
    config: ModelConfig
    driver: Cell | ColocatedWorker
    buckets: list[Bucket]
    """All buckets that a step may use, ascending."""
    experts: ExpertFacts | None = None
    """What can be moved; None: nothing, or it is another runtime's."""


def build_runtime(
    deployment: Deployment,
    *,
    observer: Observer | None = None,
    config: ModelConfig | None = None,
    names: CheckpointNames | None = None,
    open_source: OpenSource = open_folder,
) -> Runtime:
    """Loads and compiles a deployment on this process's devices.

    `config` and `names` replace what the model folder says, and `open_source` may replace its
    weights (benches with random ones).

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    use_compilation_cache()
    refuse_fallbacks(deployment.strict_kernels)
    if config is None or names is None:
        config, names = read_config(
            deployment.model, deployment.ignored_model_keys, deployment.modules
        )
    meshes = Submeshes(deployment)
    check_capacity(config, deployment, memory_of(deployment, reported_memory(meshes)))
    templates = ModelTemplates(config, deployment, meshes)
    source = open_source(deployment, names)
    driver: Cell | ColocatedWorker
    if deployment.mode == "colocated":
        built = build_colocated(templates, deployment, meshes.attention, source, names)
        driver = ColocatedWorker(*built)
        driver.observer = observer
    else:
        driver = build_cell(templates, deployment, meshes, source, names, observer)
    facts = expert_facts(templates, deployment.experts)
    return Runtime(deployment, config, driver, deployment_buckets(deployment), facts)


def reported_memory(meshes: Submeshes) -> dict[Role, int | None]:
    """Bytes that JAX may use of a device, the least of this process's devices of a role; None
    where there are none, or where they do not say (CPU)."""
    reported: dict[Role, int | None] = {}
    meshes_of: dict[Role, tuple[jax.sharding.Mesh, ...]] = {
        "attention": meshes.domains,
        "ffn": (meshes.ffn,),
    }
    for role, several in meshes_of.items():
        sizes = [memory_limit(device) for mesh in several for device in mesh.local_devices]
        known = [size for size in sizes if size is not None]
        reported[role] = min(known, default=None)
    return reported


def build_engine(
    deployment: Deployment,
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

    `meet` is called before the first step, which takes all processes: it waits for them. `prepare`
    is called before the engine is started.
    """
    ends = read_special_tokens(deployment.model).eos
    runtime = build_runtime(deployment, observer=observer, open_source=open_source)
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
        engine.start()
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
            side_by_side=deployment.mode == "afd",
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
        experts=experts or make_balancer(runtime.experts, deployment, runtime.driver.slots, counts),
    )


def warm_up_plans(runtime: Runtime) -> list[StepPlan]:
    """One step of every bucket on every lane, all padding but one token that is written nowhere."""
    deployment = runtime.deployment
    plans = []
    slots = deployment.scheduler.slots
    options: dict[str, Any] = {"rules": SlotRules(), "logprobs": 0, "targets": [0]}
    for bucket in runtime.buckets:
        for place in range(deployment.lanes * deployment.runtime_domains):
            lane, domain = divmod(place, deployment.runtime_domains)
            row = SequenceRow(
                slot=0,
                token_ids=[FROM_DEVICE] * (1 + bucket.drafts),
                kv_length=1 + bucket.drafts,
                page_ids=[deployment.cache.pages] * (bucket.pages if bucket.drafts else 1),
                sample=True,
                temperature=1.0,
                top_k=2,
                drafts=bucket.drafts,
                **({} if bucket.is_small(slots) else options),
            )
            groups = [[row] for _ in range(deployment.attention.dp)]
            plan = plan_of_rows(lane, -1, bucket, groups, slots=slots)
            if deployment.drafts:
                said = [] if deployment.modules else [SaidTokens(0, 0, bytes(4))]
                plan = msgspec.structs.replace(plan, proposes=True, said=said)
            plans.append(plan.in_domain(domain))
    return plans


def warm_up(runtime: Runtime) -> None:
    """Runs every executable and every edge once, so that the first request finds all of it warm,
    and exempts what is there then from garbage collection.

    Every process of a deployment does the same steps in the same order.
    """
    probe = Probe(runtime.driver, jax.process_index())
    probe.turn(True)
    for plan in warm_up_plans(runtime):
        runtime.driver.begin(plan)
        runtime.driver.advance().last.block_until_ready()
    probe.take(0.0)
    probe.close()
    freeze()


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

"""From a deployment to an engine that is warm: discover, mesh, load, compile, warm up.

Called by `llm.py`, `serve.py` and the bench on the leader, and by `fleet` on followers, which get
the same driver without an engine around it.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax

from jaxserve.checkpoint.hf import HFCheckpoint, read_config
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.checkpoint.store import StoreCheckpoint, open_checkpoint
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.engine.engine import Broadcast, Driver, Engine, Explain
from jaxserve.engine.garbage import freeze
from jaxserve.engine.scheduler import Scheduler
from jaxserve.link.contract import Contract
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.mesh import Submeshes, has_local_devices
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.module import Template
from jaxserve.observe.probe import Probe
from jaxserve.observe.watch import Collect, Watch
from jaxserve.progress import Progress
from jaxserve.roles.attention import (
    AttentionWorker,
    attention_executables,
    attention_programs,
)
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.capacity import Role, check_capacity, deployment_buckets, memory_of
from jaxserve.roles.cell import Cell, Workers
from jaxserve.roles.colocated import (
    ColocatedWorker,
    colocated_executables,
    colocated_programs,
)
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.compilation import ProgramKey, compile_all
from jaxserve.roles.ffn import FFNWorker, ffn_executables, ffn_programs
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.layout import FROM_DEVICE, Bucket
from jaxserve.roles.program import Program
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.step_plan import SequenceRow, SlotRules, StepPlan, plan_of_rows
from jaxserve.roles.weights import AttentionWeights, ColocatedWeights, FFNWeights, LeafSource
from jaxserve.roles.worker import Observer

logger = logging.getLogger(__name__)


class Runtime(NamedTuple):
    """A driver with its programs loaded and compiled, and what it was made from."""

    deployment: Deployment
    config: ModelConfig
    driver: Cell | ColocatedWorker
    buckets: list[Bucket]
    """All buckets that a step may use, ascending."""


def build_runtime(
    deployment: Deployment,
    *,
    observer: Observer | None = None,
    config: ModelConfig | None = None,
    names: CheckpointNames | None = None,
    source: LeafSource | None = None,
) -> Runtime:
    """Loads and compiles a deployment on this process's devices.

    `config`, `names` and `source` replace the model folder (benches with random weights).

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    use_compilation_cache()
    if config is None or names is None:
        config, names = read_config(deployment.model, deployment.ignored_model_keys)
    meshes = Submeshes(deployment)
    check_capacity(config, deployment, memory_of(deployment, reported_memory(meshes)))
    templates = ModelTemplates(config, deployment, meshes)
    source = source or open_checkpoint(deployment.model, names)
    build = build_colocated if deployment.mode == "colocated" else build_cell
    driver = build(templates, deployment, meshes, source, names, observer)
    return Runtime(deployment, config, driver, deployment_buckets(deployment))


def build_colocated(
    templates: ModelTemplates,
    deployment: Deployment,
    meshes: Submeshes,
    source: LeafSource,
    names: CheckpointNames,
    observer: Observer | None,
) -> ColocatedWorker:
    """The one worker of a colocated deployment."""
    programs = ColocatedPrograms(templates, deployment, meshes.attention)
    with load_progress(source, 2 + 2 * templates.config.layers) as counted:
        weights = ColocatedWeights(counted, names, programs)
    buckets = deployment_buckets(deployment)
    compiled = compile_all(colocated_programs(programs, buckets))
    worker = ColocatedWorker(programs, colocated_executables(programs, buckets, compiled), weights)
    worker.observer = observer
    return worker


def build_cell(
    templates: ModelTemplates,
    deployment: Deployment,
    meshes: Submeshes,
    source: LeafSource,
    names: CheckpointNames,
    observer: Observer | None,
) -> Cell:
    """The workers of the roles that this process has devices of, and the link between them."""
    buckets = deployment_buckets(deployment)
    token_sizes = sorted({bucket.tokens for bucket in buckets})
    contract = Contract.of(templates.config, deployment)
    link = RuntimeLink(
        deployment.link.transport, contract, meshes.attention, meshes.ffn, token_sizes
    )
    wanted: dict[ProgramKey, Program] = {}
    if has_local_devices(meshes.attention):
        attention = AttentionPrograms(templates, deployment, meshes.attention)
        with load_progress(source, 2 + templates.config.layers) as counted:
            attention_weights = AttentionWeights(counted, names, attention)
        wanted |= attention_programs(attention, buckets)
    if has_local_devices(meshes.ffn):
        ffn = FFNPrograms(templates, deployment, meshes.ffn)
        with load_progress(source, templates.config.layers) as counted:
            ffn_weights = FFNWeights(counted, names, ffn)
        wanted |= ffn_programs(ffn, token_sizes)
    compiled = compile_all(wanted)
    workers = Workers()
    if has_local_devices(meshes.attention):
        programs = attention_executables(attention, buckets, compiled)
        worker = AttentionWorker(attention, programs, attention_weights, link.attention)
        workers = workers._replace(attention=(worker,))
    if has_local_devices(meshes.ffn):
        ffn_worker = FFNWorker(ffn, ffn_executables(ffn, token_sizes, compiled), ffn_weights)
        ffn_worker.attach(link.ffn, token_sizes)
        workers = workers._replace(ffn=(ffn_worker,))
    rotation = Rotation(templates.config.layers, deployment.lanes)
    return Cell(workers, rotation, deployment.lanes, observer)


def reported_memory(meshes: Submeshes) -> dict[Role, int | None]:
    """Bytes that JAX may use of a device, the least of this process's devices of a role; None
    where there are none, or where they do not say (CPU)."""
    reported: dict[Role, int | None] = {}
    meshes_of: dict[Role, jax.sharding.Mesh] = {"attention": meshes.attention, "ffn": meshes.ffn}
    for role, mesh in meshes_of.items():
        sizes = [memory_limit(device) for device in mesh.local_devices]
        known = [size for size in sizes if size is not None]
        reported[role] = min(known, default=None)
    return reported


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use of a device; None: it does not say (CPU)."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # not implemented on this platform
        return None


class _CountedLeaves:
    """Another source, with every block counted."""

    def __init__(self, source: LeafSource, progress: Progress):
        self._source, self._progress = source, progress

    def leaves(
        self, template: Template, sources: Sources, shardings: Sequence[jax.sharding.Sharding]
    ) -> Iterator[jax.Array]:
        """The source's leaves."""
        yield from self._source.leaves(template, sources, shardings)
        self._progress.advance()

    def stacks(
        self,
        template: Template,
        tables: Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterator[jax.Array]:
        """The source's stacks."""
        yield from self._source.stacks(template, tables, shardings)
        self._progress.advance(len(tables))


@contextlib.contextmanager
def load_progress(source: LeafSource, blocks: int) -> Iterator[LeafSource]:
    """The source, with its blocks and bytes shown as they come."""
    size = source.size if isinstance(source, HFCheckpoint | StoreCheckpoint) else None
    process = jax.process_index()
    with Progress("load", blocks, total_bytes=size, process=process) as progress:
        if isinstance(source, HFCheckpoint | StoreCheckpoint):
            source.on_read = lambda size: progress.advance(0, size=size)
        yield _CountedLeaves(source, progress)


def build_engine(
    deployment: Deployment,
    *,
    observer: Observer | None = None,
    broadcast: Broadcast | None = None,
    explain: Explain | None = None,
    meet: Callable[[], None] = lambda: None,
    collect: Collect | None = None,
) -> Engine:
    """A warm engine; with `broadcast` the leader of several processes, not yet started.

    `meet` is called before the first step, which takes all processes: it waits for them.
    """
    ends = read_special_tokens(deployment.model).eos
    runtime = build_runtime(deployment, observer=observer)
    meet()
    warm_up(runtime)
    engine = make_engine(
        runtime, broadcast=broadcast, explain=explain, collect=collect, eos_token_ids=ends
    )
    if broadcast is None:
        engine.start()
    return engine


def make_engine(
    runtime: Runtime,
    *,
    broadcast: Broadcast | None = None,
    explain: Explain | None = None,
    collect: Collect | None = None,
    eos_token_ids: frozenset[int],
) -> Engine:
    """An engine around a runtime."""
    deployment, limits = runtime.deployment, runtime.deployment.scheduler
    tokens = sorted({bucket.tokens for bucket in runtime.buckets})
    scheduler = Scheduler(
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
    )
    return Engine(
        deployment,
        scheduler,
        cast(Driver, runtime.driver),  # The leader plays the attention role.
        vocab=runtime.config.vocab,
        eos_token_ids=eos_token_ids,
        broadcast=broadcast,
        explain=explain,
        info=_info(runtime),
        watch=Watch(Probe(runtime.driver), deployment.lanes, collect),
    )


def warm_up_plans(runtime: Runtime) -> list[StepPlan]:
    """One step of every bucket on every lane, all padding but one token that is written nowhere."""
    deployment = runtime.deployment
    plans = []
    for bucket in runtime.buckets:
        for lane in range(deployment.lanes):
            row = SequenceRow(
                slot=0,
                token_ids=[FROM_DEVICE],
                kv_length=1,
                page_ids=[deployment.cache.pages],
                sample=True,
                temperature=1.0,
                top_k=2,
                rules=SlotRules(),
                logprobs=0,
                targets=[0],
            )
            groups = [[row] for _ in range(deployment.attention.dp)]
            slots = deployment.scheduler.slots
            plans.append(plan_of_rows(lane, -1, bucket, groups, slots=slots))
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


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, private to the user, unless JAX was told where already.

    One folder a process, because JAX writes entries in place and another might read half of one.
    """
    given = jax.config.jax_compilation_cache_dir
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(given) if given else root / "jaxserve" / f"xla-{jax.__version__}"
    if jax.process_count() > 1 and not folder.name.startswith("process-"):
        folder /= f"process-{jax.process_index()}-of-{jax.process_count()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if not given:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
    }

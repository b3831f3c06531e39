"""Assembles each part of a deployment: its runtime, the engine around it, and its links.

| part | devices | runs | built by |
|---|---|---|---|
| colocated | all | a colocated worker, an engine | `whole_runtime`, `open_engine` |
| both roles in one runtime | both roles' | a cell, an engine | `whole_runtime`, `open_engine` |
| `pipeline: step` | one role's or both | a step pipeline | `whole_runtime`, `open_engine` |
| leader of either | its share | its part, an engine with followers | `open_engine`, `lead` |
| follower of either | its share | its part, no engine | `open_follower`, `following.py` |
| domain over `pull` | attention's | a cell, an engine | `domain_runtime`, `open_engine` |
| ffn worker over `pull` | ffn's | a message server | `ffn_runtime.py` |
| worker of a fleet | as above | an engine behind a port for routers | `commands/serving.py` |
| router | none | `router.py`, no JAX | `commands/routing.py` |
| face | none | a remote engine, no JAX | `server/choice.py` |

Called by `commands/`, `llm.py`, the bench and preflight. Importing this module loads no JAX: each
function imports its own part, so that a process loads and starts only what it plays.
"""

import gc
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError, EngineFailedError

if TYPE_CHECKING:
    from jaxserve.checkpoint.source import CheckpointNames
    from jaxserve.config.model import ModelConfig
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.request import TokenOutput
    from jaxserve.engine.runtime import Runtime
    from jaxserve.engine.stepper import Followers
    from jaxserve.fleet.follower import Follower
    from jaxserve.fleet.leader import Leader
    from jaxserve.fleet.prepared import Prepared
    from jaxserve.model.templates import ModelTemplates
    from jaxserve.observe.recorder import Recorder
    from jaxserve.roles.page_transfer import OpenPages
    from jaxserve.roles.pipelines import OpenModel
    from jaxserve.roles.weights import OpenSource
    from jaxserve.roles.worker import MovesExperts, ReadCounts


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices for a part beside its deployment.

    Attributes:
      token: secret of links to other processes.
      recorder: measures the stages.
      prepare: called with the engine before it starts; attaches its ends of links.
      config, names: replace the configuration in the model's folder (bench, preflight).
      weights: replaces the weights; None: those of the model's folder, or of `weights.peers`.
      prepared: work that this process did as a spare; None: it was none.
    """

    token: str = ""
    recorder: "Recorder | None" = None
    prepare: "Callable[[Engine], object]" = lambda engine: None
    config: "ModelConfig | None" = None
    names: "CheckpointNames | None" = None
    weights: "OpenSource | None" = None
    prepared: "Prepared | None" = None


DEFAULTS = Options()


# ------------------------------------------------------------------------------ parts
def open_engine(
    deployment: Deployment, options: Options = DEFAULTS, leader: "Leader | None" = None
) -> "Engine":
    """A running engine that has given its first token; with a leader its followers step with it.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
      EngineFailedError: a follower failed or did not get ready in time, or no ffn worker came
        within `link.absent_seconds`.
    """
    from jaxserve.config.special_tokens import read_special_tokens
    from jaxserve.engine.runtime import warm_up

    ends = read_special_tokens(deployment.model).eos
    if deployment.cache.host_gb:
        check_tier(deployment, options)
    followers = None
    if leader is None:
        options = with_peers(options)
        runtime = build_runtime(deployment, options)
    else:
        runtime, followers = lead(deployment, options, leader)
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=ends, followers=followers)
    options.prepare(engine)
    if leader is not None:
        leader.wait_ready()
    start_checked(engine)
    return engine


def lead(deployment: Deployment, options: Options, leader: "Leader") -> "tuple[Runtime, Followers]":
    """Builds the leader's runtime, and waits until every follower has built its own."""
    from jaxserve.checkpoint.fingerprint import revision
    from jaxserve.fleet.leading import LedFollowers

    runtime = build_runtime(deployment, options)
    leader.begin_warm_up(revision(deployment.model).digest + runtime.driver.exchanges)
    return runtime, LedFollowers(leader)


def open_follower(
    deployment: Deployment, follower: "Follower", options: Options = DEFAULTS
) -> "Runtime":
    """A follower's runtime, warm; `following.Following` runs the leader's plans on it.

    Raises:
      EngineFailedError: the leader is gone or sent something invalid.
      ConfigError, CheckpointError: this process cannot load its part.
    """
    from jaxserve.checkpoint.fingerprint import revision
    from jaxserve.engine.runtime import warm_up

    runtime = build_runtime(deployment, options)
    follower.wait_warm_up(revision(deployment.model).digest + runtime.driver.exchanges)
    warm_up(runtime)
    return runtime


# --------------------------------------------------------------------------- runtimes
def build_runtime(deployment: Deployment, options: Options = DEFAULTS) -> "Runtime":
    """Loads and compiles this process's part of a deployment.

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    if deployment.topology.crosses_runtimes:
        return domain_runtime(deployment, options)
    return whole_runtime(deployment, options)


def whole_runtime(deployment: Deployment, options: Options) -> "Runtime":
    """Builds a runtime that needs no other, with its pipeline (`roles/pipelines.py`)."""
    from jaxserve.engine.runtime import Runtime
    from jaxserve.roles.pipelines import build

    model = open_model(deployment, options)
    driver = build(model, deployment, options.recorder)
    return Runtime(deployment, model.config, driver, model.templates)


def domain_runtime(deployment: Deployment, options: Options) -> "Runtime":
    """Builds the runtime of an attention domain, whose ffn workers are in other runtimes."""
    from jaxserve.checkpoint.opening import open_folder
    from jaxserve.engine.runtime import Runtime
    from jaxserve.fleet.attention_runtime import attention_cell
    from jaxserve.fleet.remote_experts import RemoteExperts
    from jaxserve.fleet.role_runtime import open_role
    from jaxserve.roles.attention_bytes import attention_bytes

    role = open_role(deployment, "attention", attention_bytes, prepared=options.prepared)
    source = (options.weights or open_folder)(deployment, role.names)
    cell, client = attention_cell(role, deployment, source, options.token, options.recorder)
    experts: Any = getattr(client, "experts", None)  # of shards
    if experts is None:
        experts = RemoteExperts(client.ask, where=lambda: client.last_used)
    return Runtime(deployment, role.config, cell, experts=experts, link=client)


def own_experts(
    runtime: "Runtime", templates: "ModelTemplates", counts: "ReadCounts | None"
) -> "MovesExperts | None":
    """The balancer of the leader of a runtime with an ffn mesh; None without routed experts.

    Args:
      counts: reads the token counts of the followers; None: there are none.
    """
    from jaxserve.roles.expert_balancer import make_balancer

    return make_balancer(templates, runtime.deployment, runtime.driver.slots, counts)


def open_model(deployment: Deployment, options: Options = DEFAULTS) -> "OpenModel":
    """Reads the model's configuration, and checks that the deployment fits on the devices here.

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    from jaxserve.checkpoint.int8_products import read_model, with_int8_products
    from jaxserve.checkpoint.opening import open_folder
    from jaxserve.mesh import Submeshes
    from jaxserve.model.matrix_formats import placed
    from jaxserve.model.templates import ModelTemplates
    from jaxserve.roles.capacity import check_memory
    from jaxserve.roles.compilation import use_compilation_cache
    from jaxserve.roles.pipelines import OpenModel, sizes_of
    from pallas_kernels.coverage import refuse_fallbacks

    use_compilation_cache()
    refuse_fallbacks(deployment.strict_kernels)
    if options.config is None or options.names is None:
        config, names = read_model(deployment)
    else:
        config, names = with_int8_products(options.config, deployment), options.names
    meshes = Submeshes(deployment)
    config = placed(config, meshes.ffn)
    attention = {device for mesh in meshes.domains for device in mesh.local_devices}
    ffn = set(meshes.ffn.local_devices)
    sizes = sizes_of(deployment, meshes)
    check_memory(config, deployment, {"attention": attention, "ffn": ffn}, sizes)
    gc.freeze()  # as `open_role` does
    templates = ModelTemplates(config, deployment, meshes)
    source = (options.weights or open_folder)(deployment, names)
    return OpenModel(config, names, meshes, templates, source)


def with_peers(options: Options) -> Options:
    """Options whose weights come from `weights.peers`, where the deployment names some."""
    from jaxserve.checkpoint.peer import open_weights

    weights = options.weights or partial(open_weights, token=options.token)
    return replace(options, weights=weights)


# ---------------------------------------------------------------------------- engines
def make_engine(
    runtime: "Runtime", *, eos_token_ids: frozenset[int], followers: "Followers | None" = None
) -> "Engine":
    """An engine around a runtime, not started.

    Args:
      followers: the other processes of the runtime; None: this is its only one.

    Raises:
      ConfigError: `cache.host_gb` has no room for a page.
    """
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.scheduler import Scheduler
    from jaxserve.engine.sequence import SchedulerSizes
    from jaxserve.model.attention.kv_cache import largest_window, ring_pages
    from jaxserve.observe.probe import Probe
    from jaxserve.observe.watch import Watch

    deployment, domains = runtime.deployment, runtime.deployment.runtime_domains
    sizes = SchedulerSizes.of(
        deployment,
        sorted({bucket.tokens for bucket in runtime.buckets}),
        ring_pages(runtime.config, deployment),
        largest_window(runtime.config),
    )
    collect, counts = (followers.measured, followers.counts) if followers else (None, None)
    experts = runtime.experts
    if runtime.templates is not None:
        experts = own_experts(runtime, runtime.templates, counts)
    engine = Engine(
        deployment,
        [Scheduler(sizes) for _ in range(domains)],
        runtime.driver,
        vocab=runtime.config.vocab,
        eos_token_ids=eos_token_ids,
        followers=followers,
        link=runtime.link,
        info=_info(runtime),
        watch=Watch(
            *(Probe(runtime.driver), domains * deployment.lanes, collect),
            passes=getattr(runtime.experts, "passes", None),
        ),
        experts=experts if runtime.config.experts else None,
    )
    if deployment.cache.host_gb:
        with_host_tier(engine, None if followers is None else led_pages(engine))
    return engine


def check_tier(deployment: Deployment, options: Options) -> None:
    """Refuses a tier in host memory that cannot work, before the model is loaded and compiled."""
    from jaxserve.fleet.host_tier import check_host_tier

    check_host_tier(deployment, options.config)


def with_host_tier(engine: "Engine", access: "OpenPages | None") -> None:
    """Gives an engine that is not started yet a tier of KV pages in host memory."""
    from jaxserve.fleet.host_tier import open_host_tier

    open_host_tier(engine, access)


def led_pages(engine: "Engine") -> "OpenPages":
    """Access to pages of which other processes of the engine's runtime may have a part."""
    from jaxserve.roles.page_spread import page_access

    return partial(page_access, tell=engine.tell)


def _info(runtime: "Runtime") -> dict[str, Any]:
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


def start_checked(engine: "Engine") -> None:
    """Starts an engine and runs a first token; closes the engine again if the token is none.

    One token passes every layer, but only the experts that it is routed to. So weights with NaN or
    Inf are refused by name before the engine takes requests.

    Raises:
      CheckpointError: The logits are not finite. Names the blocks of this process that are not.
      EngineFailedError: The engine failed, or gave no token in time.
    """
    from jaxserve.engine.runtime import is_finite
    from jaxserve.engine.stepper import PREFILL_PARAMS

    engine.start()
    news: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    engine.submit([0], PREFILL_PARAMS, news.put)
    try:
        output = news.get(timeout=2 * engine.deployment.cluster.step_seconds)
    except queue.Empty:
        raise EngineFailedError("the first token did not come in time") from None
    if output.engine_failed:
        raise EngineFailedError(output.error or "the engine failed at its first token")
    if output.error is not None:
        found = ", ".join(block.name for block in engine.driver.held() if not is_finite(block))
        engine.close()
        raise CheckpointError(
            f"{engine.deployment.model}: logits are not finite, nor are {found or 'other parts'}"
        )

"""From a deployment to an engine that is warm: discover, mesh, load, compile, warm up.

Called by `llm.py`, `serve.py` and the bench on the leader, and by `fleet` on followers, which get
the same driver without an engine around it.
"""

from collections.abc import Callable

import jax

from jaxserve.checkpoint.hf import read_config
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.store import open_folder
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.engine.engine import Engine, Explain
from jaxserve.engine.runtime import Runtime, make_engine, warm_up
from jaxserve.engine.stepper import Broadcast
from jaxserve.mesh import Role, Submeshes, memory_limit
from jaxserve.model.blocks import ModelTemplates
from jaxserve.observe.watch import Collect
from jaxserve.roles.build_cell import build_cell
from jaxserve.roles.capacity import check_capacity, deployment_buckets, memory_of
from jaxserve.roles.cell import Cell
from jaxserve.roles.colocated import ColocatedWorker, build_colocated
from jaxserve.roles.expert_balancer import expert_facts, make_balancer
from jaxserve.roles.expert_moves import MovesExperts, ReadCounts
from jaxserve.roles.program_cache import use_compilation_cache
from jaxserve.roles.weights import OpenSource
from jaxserve.roles.worker import Observer
from pallas_kernels.coverage import refuse_fallbacks


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

    def balancer(others: ReadCounts | None) -> MovesExperts | None:
        return make_balancer(facts, deployment, driver.slots, others)

    return Runtime(deployment, config, driver, deployment_buckets(deployment), balancer)


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

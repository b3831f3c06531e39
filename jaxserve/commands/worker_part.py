"""Which worker of a fleet a process is, and its port for routers."""

import functools
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import jaxserve
from jaxserve.checkpoint.fingerprint import Revision, revision
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import STAND_IN, ProcessArguments
from jaxserve.fleet.request_frames import GrammarOf
from jaxserve.fleet.worker_frames import Become, WorkerFacts, WorkerRole, hello_of
from jaxserve.fleet.worker_port import WorkerPort
from jaxserve.server import choice
from jaxserve.text.structured import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.runtime import Driver
    from jaxserve.roles.page_spread import LedPages


class WorkerPart(NamedTuple):
    """A worker of a fleet."""

    role: WorkerRole
    address: str
    """Where it listens for routers."""
    fleet: Deployment
    """The deployment of the whole fleet."""
    stands_in: bool = False
    """Whether it was started in the other role."""


def part_of(
    deployment: Deployment, process: ProcessArguments, listen: str | None
) -> tuple[Deployment, ProcessArguments, WorkerPart | None]:
    """Deployment of a process with `--role`, its place in its runtime, and its part in the fleet.

    Without a part, the process serves clients itself.

    Raises:
      ConfigError: the fleet has no such worker.
    """
    role, fleet = process.role, deployment.fleet
    apart = deployment.topology.crosses_runtimes
    if role == "prefill":
        addresses, key = fleet.prefill, "fleet.prefill"
    elif role == "decode" or (role == "attention" and apart and (listen or fleet.domains)):
        addresses, key = fleet.domains, "fleet.domains"
    elif process.stand_in:
        raise ConfigError(f"{STAND_IN}: of a worker behind a router, not of --role {role}")
    else:
        return deployment, process, None
    if role == "decode" and apart:
        raise ConfigError(
            f"--role decode: over link.transport = {deployment.link.transport} a domain is an "
            "attention worker: --role attention"
        )
    address = listen or ""
    if not address:
        if fleet.registry != "static":
            raise ConfigError(f"--role {role}: {key} has names of Services, so say --listen")
        if process.worker >= len(addresses):
            raise ConfigError(
                f"--role {role} --worker {process.worker}: {key} has {len(addresses)} addresses; "
                "say another number, or --listen"
            )
        address = addresses[process.worker]
    if process.stand_in:
        domain = "attention" if apart else "decode"
        role = domain if role == "prefill" else "prefill"
    part = WorkerPart(
        "prefill" if role == "prefill" else "domain", address, deployment, process.stand_in
    )
    own = deployment_of(deployment, role)
    inner = "attention" if own.topology.crosses_runtimes else ""
    return own, msgspec.structs.replace(process, role=inner), part


def worker_port(
    deployment: Deployment, part: WorkerPart, token: str, on_become: Callable[[Become], None] | None
) -> WorkerPort:
    """The port of a worker; arguments and errors as of `WorkerPort`. It names the weights and end
    tokens that the model's folder has now, before anything is loaded."""
    model, weights = deployment.model, revision(deployment.model)
    ends = sorted(read_special_tokens(model).eos)

    @functools.cache
    def compiler(vocab: int) -> GrammarCompiler:
        made = GrammarCompiler(Tokenizer.from_folder(model), vocab)
        weights.check()
        return made

    def restore(grammar: GrammarOf, vocab: int) -> Any:
        return compiler(vocab).restored(grammar.serialised, grammar.begins_after)

    return choice.worker_port(
        *(deployment, part.role, part.address),
        token,
        hello_of(part.role, weights.model),
        functools.partial(worker_facts, deployment, part, on_become is not None, weights, ends),
        restore,
        part.fleet.fleet.resume_seconds,
        on_become,
    )


def add_pages_end(engine: "Engine", part: WorkerPart, token: str) -> None:
    """Gives an engine that is not started yet its end of the pages link.

    A prefill worker's pages server listens where `pages.listen` says, or on the host of its port.
    """
    from jaxserve.fleet import pages_link

    join = pkgutil.resolve_name(pages_link.ENDS[part.role])
    if part.role == "prefill":
        address = part.fleet.pages.listen or f"{part.address.rpartition(':')[0]}:0"
        join = functools.partial(join, address=address)
    elif not part.fleet.prefill.workers:
        return
    join(engine, token, pieces=pages_link.piece_tokens(part.fleet))


def follow_pages(
    deployment: Deployment, part: WorkerPart | None, driver: "Driver"
) -> "Mapping[int, LedPages]":
    """Access to the pages of a following process by its number, in the leader's order."""
    found: list[LedPages] = []
    if deployment.cache.host_gb:
        from jaxserve.fleet.host_tier import tier_accesses
        from jaxserve.roles.page_spread import page_access

        found += tier_accesses(deployment, driver, page_access)
    if part is not None and part.fleet.prefill.workers:
        from jaxserve.fleet import pages_link

        pieces = pages_link.piece_tokens(part.fleet)
        found += pages_link.page_accesses(driver, deployment, part.role, pieces)
    return {access.number: access for access in found}


def worker_facts(
    deployment: Deployment,
    part: WorkerPart,
    can_become: bool,
    weights: Revision,
    ends: list[int],
    engine: "Engine",
) -> WorkerFacts:
    """Facts that routers need of an engine.

    Args:
      can_become: whether its process can change its role.
      weights: weights that it has loaded.
      ends: end tokens of its model.
    """
    import jax

    from jaxserve.roles.sizing import attention_cost  # imports JAX, too

    role, limits, cost = part.role, deployment.scheduler, 0.0
    info = dict(engine.model_info())
    if role == "prefill":
        config, platform = read_model(deployment)[0], jax.default_backend()
        cost = attention_cost(config, platform, limits.token_budget)
    groups = deployment.runtime_domains * deployment.attention.dp
    return WorkerFacts(
        role=role,
        slots=groups * deployment.lanes * limits.slots,
        groups=groups,
        pages=deployment.cache.pages,
        page_size=deployment.cache.page_size,
        max_length=limits.max_length,
        vocab=info["vocab_size"],
        eos_token_ids=ends,
        info=info,
        weights=weights.digest,
        version=jaxserve.__version__,
        can_stand_in=can_become,
        stands_in=part.stands_in,
        attention_cost=cost,
    )

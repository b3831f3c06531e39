"""An engine around a runtime whose programs are loaded and compiled, and its first steps.

Which workers the runtime has is not known here: `build.py` makes one of a whole deployment,
`fleet/attention_runtime.py` that of an attention worker alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.engine.engine import Engine, Explain
from jaxserve.engine.garbage import freeze
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.stepper import Broadcast, Driver
from jaxserve.observe.probe import Probe
from jaxserve.observe.watch import Collect, Watch
from jaxserve.roles.expert_moves import MovesExperts, ReadCounts
from jaxserve.roles.layout import FROM_DEVICE, Bucket
from jaxserve.roles.step_plan import SaidTokens, SequenceRow, SlotRules, StepPlan, plan_of_rows

if TYPE_CHECKING:
    from jaxserve.roles.cell import Cell
    from jaxserve.roles.colocated import ColocatedWorker


class Runtime(NamedTuple):
    """A driver with its programs loaded and compiled, and what it was made from."""

    deployment: Deployment
    config: ModelConfig
    driver: "Cell | ColocatedWorker"
    buckets: list[Bucket]
    """All buckets that a step may use, ascending."""
    make_balancer: Callable[[ReadCounts | None], MovesExperts | None] = lambda others: None
    """Makes who moves its experts, who reads the counts of other processes by this; None: it has
    none, or they are another runtime's."""


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
        experts=experts or runtime.make_balancer(counts),
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

"""Drives steps in processes that each play one role (`pipeline: step`).

All processes get the same plans in the same order, so they make the same dispatches.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import ATTENTION_RULES, FFN_RULES, cached_sharding
from jaxserve.model.attention.kv_cache import PAGES_SPEC
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.compilation import compile_all, compile_steps
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline, options
from jaxserve.roles.layout import Bucket, deployment_buckets, token_sizes
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import Arrays
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.step_programs import (
    AttentionStepPrograms,
    FFNStepPrograms,
    exchanges_digest,
    union_mesh,
)
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.token_programs import zeroed
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer, Passed


class RolePipeline(StepPipeline):
    """One role's part of every step."""

    def renew(self) -> bool:
        """Returns False: after a lost step the two roles' processes cannot begin anew."""
        return False


class AttentionPipeline(RolePipeline):
    """The attention role's part of every step."""

    def __init__(
        self, model: OpenModel, deployment: Deployment, mesh: Mesh, observer: Observer | None
    ):
        config, names, _, templates, source = model
        programs = AttentionStepPrograms(templates, deployment, mesh)
        self._programs = AttentionPrograms(templates, deployment, model.meshes.attention)
        with load_progress(source, 2 + config.layers):
            weights = RoleWeights(source, mesh)
            embedding, head = weights.add_ends(templates, names, ATTENTION_RULES)
            for kind, first, stop in config.runs():
                block, sources = templates.attention[kind], names.attention[first:stop]
                weights.add("attention", block, sources, ATTENTION_RULES, first)
        super().__init__(deployment.lanes, weights, observer=observer)
        self._leaves = sum(weights.blocks, embedding + head)
        buckets, lanes = deployment_buckets(deployment), range(1, 1 + deployment.lanes)
        self.executables = compile_all(
            {(b, n): programs.step(b, n) for b in buckets for n in lanes}
        )
        self._ends = compile_steps(options, programs, buckets)
        self._union, self._pages = mesh, zeroed(programs.all_pages, mesh)
        self._tokens = TokenLanes(programs, head)

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        step, lanes = self.executables[bucket, len(steps)], len(steps)
        made = step(*(array for one in steps for array in one), *self._pages, *self._leaves)
        width = (len(made) - 1 - len(self._pages)) // lanes
        self._pages = list(made[width * lanes : -1])
        each = (made[width * lane : width * (lane + 1)] for lane in range(lanes))
        return [(tuple(left), (x,)) for *left, x in each]

    def _own_pages(self) -> list[jax.Array]:
        return _on(self._programs.mesh, self._pages)

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        self._pages = _on(self._union, pages)


def _on(mesh: Mesh, pages: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns pages of the attention mesh as arrays of the union, or the reverse. Copies nothing:
    this process's shards are the same on both."""
    (shards, assemble), sharding = fast_shards(), cached_sharding(mesh, PAGES_SPEC)
    return [assemble(array.shape, array.dtype, sharding)(shards(array)) for array in pages]


class FFNPipeline(RolePipeline):
    """The ffn role's part of every step."""

    attends = False

    def __init__(
        self, model: OpenModel, deployment: Deployment, mesh: Mesh, observer: Observer | None
    ):
        config, names, meshes, templates, source = model
        programs = FFNStepPrograms(templates, deployment, meshes.ffn, mesh)
        with load_progress(source, config.layers):
            weights = RoleWeights(source, mesh)
            for kind, first, stop in config.runs():
                weights.add("ffn", templates.ffn[kind.ffn], names.ffn[first:stop], FFN_RULES, first)
        sizes, lanes = token_sizes(deployment), range(1, 1 + deployment.lanes)
        self.executables = compile_all(
            {(Bucket(size, 1), n): programs.step(size, n) for size in sizes for n in lanes}
        )
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def _run(self, plans: Sequence[StepPlan]) -> list[Passed]:
        slots, size = self.slots, Bucket(plans[0].bucket.tokens, 1)
        experts = [] if slots is None else [*slots.tables, *slots.counts]
        leaves = (leaf for block in self._weights.blocks for leaf in block)
        *counts, token = self.executables[size, len(plans)](*experts, *leaves)
        if slots is not None:
            slots.counts = counts
        return [Passed(token)] * len(plans)


def build_pipeline(
    model: OpenModel, deployment: Deployment, observer: Observer | None = None
) -> RolePipeline:
    """Loads and compiles this process's role.

    Raises:
      ConfigError: the devices are TPUs.
    """
    meshes, attends = model.meshes, bool(model.meshes.attention.local_devices)
    mesh = union_mesh(meshes.attention, meshes.ffn, meshes.attention if attends else meshes.ffn)
    role = (AttentionPipeline if attends else FFNPipeline)(model, deployment, mesh, observer)
    role.exchanges = f", exchanges = {exchanges_digest(role.executables, meshes.ffn.size)}"
    return role

"""Drives steps in processes that each play one role (`pipeline: step`).

All processes get the same plans in the same order, so they make the same dispatches.
"""

import itertools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import ATTENTION_RULES, FFN_RULES, cached_sharding, zeros_of
from jaxserve.model.attention.kv_cache import PAGES_SPEC
from jaxserve.roles.attention_programs import AttentionPrograms, add_modules
from jaxserve.roles.compilation import compile_all
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline, all_runs, dispatches, options
from jaxserve.roles.layout import Bucket
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
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer, Passed, modules_of


class AttentionPipeline(StepPipeline):
    """The attention role's part of every step."""

    def __init__(
        self, model: OpenModel, deployment: Deployment, mesh: Mesh, observer: Observer | None
    ):
        config, names, _, templates, source = model
        programs = AttentionStepPrograms(templates, deployment, mesh)
        self._programs = AttentionPrograms(templates, deployment, model.meshes.attention)
        with load_progress(source, 2 + config.all_layers):
            weights = RoleWeights(source, mesh)
            embedding, head = weights.add_ends(templates, names, ATTENTION_RULES)
            for kind, first, stop in all_runs(config):
                block, sources = templates.attention[kind], names.attention[first:stop]
                weights.add("attention", block, sources, ATTENTION_RULES, first)
            self._leaves = sum(weights.blocks, embedding + head)
            modules = add_modules(weights, templates, names)
        super().__init__(deployment.lanes, weights, observer=observer)
        self._compile(programs, options, embedding, head, modules)
        self._union, self._pages = mesh, zeros_of(programs.all_pages)
        self._tokens = TokenLanes(programs, head)

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        return [(tuple(left), (x,)) for *left, x in self._layers(bucket, 0, steps)]

    def _layers(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        step, given = self.executables[bucket, len(steps), module], itertools.chain(*steps)
        made = step(*given, *self._state, *self._leaves)
        end = len(made) - 1 - len(self._pages)
        self._keep(made[end:-1])
        return [*itertools.batched(made[:end], end // len(steps))]

    def _own_pages(self) -> list[jax.Array]:
        return _on(self._programs.mesh, self._pages)

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        self._pages = _on(self._union, pages)


def _on(mesh: Mesh, pages: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns pages of the attention mesh as arrays of the union, or the reverse. Copies nothing:
    this process's shards are the same on both."""
    (shards, assemble), sharding = fast_shards(), cached_sharding(mesh, PAGES_SPEC)
    return [assemble(array.shape, array.dtype, sharding)(shards(array)) for array in pages]


class FFNPipeline(StepPipeline):
    """The ffn role's part of every step."""

    attends = False

    def __init__(
        self, model: OpenModel, deployment: Deployment, mesh: Mesh, observer: Observer | None
    ):
        config, names, meshes, templates, source = model
        programs = FFNStepPrograms(templates, deployment, meshes.ffn, mesh)
        with load_progress(source, config.all_layers):
            weights = RoleWeights(source, mesh)
            for kind, first, stop in all_runs(config):
                weights.add("ffn", templates.ffn[kind.ffn], names.ffn[first:stop], FFN_RULES, first)
        sizes = {(Bucket(b.tokens, 1), n, module) for b, n, module in dispatches(deployment)}
        steps = {one: programs.step(one[0].tokens, *one[1:]) for one in sizes}
        self._config, self._pages, self.executables = config, [], compile_all(steps)
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def _run(self, plans: Sequence[StepPlan]) -> list[Passed]:
        bucket, leaves = plans[0].bucket, sum(self._weights.blocks, ())
        for module in (0, *modules_of(self._config, bucket)):
            step = self.executables[Bucket(bucket.tokens, 1), len(plans), module]
            *counts, token = step(*self._state, *leaves)
            self._keep(counts)
        return [Passed(token)] * len(plans)


def build_pipeline(
    model: OpenModel, deployment: Deployment, observer: Observer | None = None
) -> StepPipeline:
    """Loads and compiles this process's role.

    Raises:
      ConfigError: the devices are TPUs.
    """
    meshes, attends = model.meshes, bool(model.meshes.attention.local_devices)
    mesh = union_mesh(meshes.attention, meshes.ffn, meshes.attention if attends else meshes.ffn)
    role = (AttentionPipeline if attends else FFNPipeline)(model, deployment, mesh, observer)
    role.exchanges = f", exchanges = {exchanges_digest(role.executables, meshes.ffn.size)}"
    return role

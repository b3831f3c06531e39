"""Drives steps in processes that each play one role (`pipeline: step`).

All processes get the same plans in the same order, so they make the same dispatches. Arrays are
those of the role's own mesh, except inside a dispatch.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.shards import Assemble, fast_shards
from jaxserve.mesh import ATTENTION_RULES, zeros_of
from jaxserve.roles.attention_programs import add_modules
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
    Union,
    exchanges_digest,
)
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer, Passed, modules_of


class _OnUnion:
    """Makes arrays of the union from those of a role's own mesh, or the reverse. Copies nothing:
    this process's shards are the same on both."""

    def __init__(self, union: Union):
        self._union, (self._shards, self._assemble) = union, fast_shards()
        self._makers: dict[Any, list[Assemble]] = {}
        self._kept: dict[int, tuple[jax.Array, jax.Array, Assemble]] = {}

    def __call__(
        self, arrays: Sequence[jax.Array], kind: Any = None, *, back: bool = False
    ) -> list[jax.Array]:
        """Returns arrays of the own mesh as arrays of the union; or, back, the reverse. Arrays of a
        kind always have the same shapes."""
        makers = self._makers.get((kind, back))
        if makers is None or kind is None:
            self._makers[kind, back] = makers = [self._maker(each, back=back) for each in arrays]
        shards = map(self._shards, arrays)
        return [make(own) for make, own in zip(makers, shards, strict=True)]

    def keep(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays on the union, of which few differ from those of the call before."""
        for place, array in enumerate(arrays):
            kept = self._kept.get(place)
            if kept is None or kept[0] is not array:
                make = self._maker(array) if kept is None else kept[2]
                self._kept[place] = array, make(self._shards(array)), make
        return [there for _, there, _ in self._kept.values()]

    def _maker(self, array: jax.Array, *, back: bool = False) -> Assemble:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        made = self._union.array(shape, back=back)
        return self._assemble(made.shape, made.dtype, made.sharding)


class AttentionPipeline(StepPipeline):
    """The attention role's part of every step."""

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None):
        config, names, meshes, templates, source = model
        union = Union.of(meshes, deployment.ffn.instances, 0)
        self._programs = programs = AttentionStepPrograms(templates, deployment, union)
        self._on_union = _OnUnion(union)
        with load_progress(source, 2 + config.all_layers):
            weights = RoleWeights(source, union.own)
            embedding, head = weights.add_ends(templates, names, ATTENTION_RULES)
            for kind, first, stop in all_runs(config):
                block, sources = templates.attention[kind], names.attention[first:stop]
                weights.add("attention", block, sources, ATTENTION_RULES, first)
            self._leaves = self._on_union(sum(weights.blocks, embedding + head))
            modules = add_modules(weights, templates, names)
        super().__init__(deployment.lanes, weights, observer=observer)
        self._compile(programs, options, embedding, head, modules)
        self._pages = zeros_of(programs.all_pages)
        self._tokens = TokenLanes(programs, head)

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        return [(tuple(left), (x,)) for *left, x in self._layers(bucket, 0, steps)]

    def _layers(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        kind, given = (bucket, len(steps), module), [*itertools.chain(*steps), *self._state]
        made = self.executables[kind](*self._on_union(given, kind), *self._leaves)
        made, end = self._on_union(made[:-1], kind, back=True), len(made) - 1 - len(self._pages)
        self._keep(made[end:])
        return [*itertools.batched(made[:end], end // len(steps))]


class FFNPipeline(StepPipeline):
    """The ffn role's part of every step."""

    attends = False

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None):
        config, names, meshes, templates, source = model
        union = Union.of(meshes, deployment.ffn.instances, 1)
        programs = FFNStepPrograms(templates, deployment, union)
        self._on_union = _OnUnion(union)
        with load_progress(source, config.all_layers):
            weights, rules = RoleWeights(source, union.own), meshes.ffn_rules
            for kind, first, stop in all_runs(config):
                weights.add("ffn", templates.ffn[kind.ffn], names.ffn[first:stop], rules, first)
        sizes = {(Bucket(b.tokens, 1), n, module) for b, n, module in dispatches(deployment)}
        steps = {one: programs.step(one[0].tokens, *one[1:]) for one in sizes}
        self._config, self._pages, self.executables = config, [], compile_all(steps)
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def _run(self, plans: Sequence[StepPlan]) -> list[Passed]:
        bucket = plans[0].bucket
        for module in (0, *modules_of(self._config, bucket)):
            kind = Bucket(bucket.tokens, 1), len(plans), module
            given = [*self._state, *itertools.chain(*self._weights.blocks)]
            made = self.executables[kind](*self._on_union.keep(given))
            *counts, token = self._on_union(made, kind, back=True)
            self._keep(counts)
        return [Passed(token)] * len(plans)


def build_pipeline(
    model: OpenModel, deployment: Deployment, observer: Observer | None = None
) -> StepPipeline:
    """Loads and compiles this process's role.

    Raises:
      ConfigError: the devices are TPUs.
    """
    attention = model.meshes.attention
    kind = AttentionPipeline if attention.local_devices else FFNPipeline
    role = kind(model, deployment, observer)
    role.exchanges = f", exchanges = {exchanges_digest(role.executables, attention.size)}"
    return role

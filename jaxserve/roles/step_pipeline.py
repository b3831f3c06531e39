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
from jaxserve.roles.attention_programs import AttentionPrograms, add_modules
from jaxserve.roles.compilation import Arrays, compile_all
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline, all_runs, dispatches, options
from jaxserve.roles.layout import Bucket
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.sampling import TokenLanes
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.step_programs import (
    AttentionStepPrograms,
    FFNStepPrograms,
    Union,
    exchanges_digest,
)
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer, Passed, modules_of


class _OnUnion:
    """Makes arrays of the union from those of a role's own mesh, and the reverse. Copies nothing:
    this process's shards are the same on both. Arrays of a kind always have the same shapes."""

    def __init__(self, union: Union):
        self._union, (self._shards, self._assemble) = union, fast_shards()
        self._made: dict[Any, tuple[list[Any], list[Any], list[Assemble]]] = {}
        self._back: dict[Any, list[Assemble]] = {}
        self._same = union.own is union.mesh

    def __call__(self, arrays: Sequence[jax.Array], kind: Any) -> list[jax.Array]:
        """Returns arrays of the own mesh as arrays of the union; those that are the same as in the
        last call of this kind are not made again."""
        if self._same:
            return [*arrays]
        if (found := self._made.get(kind)) is None:
            nothing: list[Any] = [None] * len(arrays)
            found = [*nothing], nothing, [self._maker(each) for each in arrays]
            self._made[kind] = found
        last, there, makers = found
        for place, array in enumerate(arrays):
            if array is not last[place]:
                last[place], there[place] = array, makers[place](self._shards(array))
        return [*there]

    def back(self, arrays: Sequence[jax.Array], kind: Any) -> list[jax.Array]:
        """Returns arrays of the union as arrays of the own mesh."""
        if self._same:
            return [*arrays]
        if (makers := self._back.get(kind)) is None:
            self._back[kind] = makers = [self._maker(each, back=True) for each in arrays]
        return [make(self._shards(each)) for make, each in zip(makers, arrays, strict=True)]

    def one_back(self, array: jax.Array) -> jax.Array:
        """Returns an array of the union, of any kind, as one of the own mesh."""
        return self.back([array], (array.shape, array.dtype, array.sharding))[0]

    def _maker(self, array: jax.Array, *, back: bool = False) -> Assemble:
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        made = self._union.array(shape, back=back)
        return self._assemble(made.shape, made.dtype, made.sharding)


class AttentionPipeline(StepPipeline):
    """The attention role's part of every step."""

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None):
        config, names, meshes, templates, source = model
        union = Union.of(meshes, deployment.ffn.instances, 0)
        programs = AttentionStepPrograms(templates, deployment, kept := union.kept)
        self._programs = AttentionPrograms(templates, deployment, union.own)
        self._on_union, self._pages_on_union = _OnUnion(kept), _OnUnion(union)
        with load_progress(source, 2 + config.all_layers):
            weights = RoleWeights(source, kept.own)
            embedding, head = weights.add_ends(templates, names, ATTENTION_RULES)
            for kind, first, stop in all_runs(config):
                block, sources = templates.attention[kind], names.attention[first:stop]
                weights.add("attention", block, sources, ATTENTION_RULES, first)
            self._leaves = self._on_union(sum(weights.blocks, embedding + head), "leaves")
            modules = add_modules(weights, templates, names)
        super().__init__(deployment.lanes, weights, observer=observer)
        self._compile(programs, options, embedding, head, modules)
        self._pages = self._on_union(zeros_of(programs.all_pages), "pages")
        self._tokens = TokenLanes(programs, head, self._on_union.one_back)

    def _own_pages(self) -> Sequence[jax.Array]:
        return self._pages_on_union.back(self._pages, "pages")

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        self._pages = self._pages_on_union(pages, "pages")

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        found: list[tuple[Arrays, Arrays]] = []
        for last, sampled, logits, *lengths, x in self._enqueued(bucket, 0, steps):
            last, sampled, *lengths = self._on_union.back([last, sampled, *lengths], bucket)
            found.append(((last, sampled, logits, *lengths), (x,)))
        return found

    def _layers(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        made = self._enqueued(bucket, module, steps)
        return [tuple(map(self._on_union.one_back, lane)) for lane in made]

    def _enqueued(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        """Enqueues a dispatch; returns each lane's results, as arrays of the union."""
        kind = bucket, len(steps), module
        given = self._on_union([*itertools.chain(*steps)], kind)
        *made, _ = self.executables[kind](*given, *self._pages, *self._leaves)
        end = len(made) - len(self._pages)
        self._keep(made[end:])
        return [*itertools.batched(made[:end], end // len(steps))]


class FFNPipeline(StepPipeline):
    """The ffn role's part of every step."""

    attends = False

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None):
        config, names, meshes, templates, source = model
        union = Union.of(meshes, deployment.ffn.instances, 1).kept
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
            made = self.executables[kind](*self._on_union(given, "state"))
            *counts, token = self._on_union.back(made, "state")
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

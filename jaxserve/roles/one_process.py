"""Drives steps as one program of both roles, in a process that has the devices of both
(`pipeline: step`)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import msgspec
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.shards import Assemble, fast_shards
from jaxserve.mesh import ATTENTION_RULES, cached_sharding, sharded_zeros
from jaxserve.model.attention.kv_cache import PAGES_SPEC
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.compilation import Get, compile_all, compile_steps
from jaxserve.roles.drafting import DraftingExecutables, drafting_executables
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.one_program import BothRolesPrograms
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import PIECES, ROWS
from jaxserve.roles.sampling import Finished, SamplingExecutables, sampling_executables
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.token_programs import KVArrays
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer


class _Ends(NamedTuple):
    """Programs of the attention mesh, before and after the layers of a lane's step."""

    embedded: jax.stages.Compiled
    leave: jax.stages.Compiled
    sampling: SamplingExecutables | None
    drafting: DraftingExecutables | None


def _ends(programs: BothRolesPrograms, buckets: Sequence[Bucket], get: Get) -> dict[Bucket, _Ends]:
    return {
        bucket: _Ends(
            get(BothRolesPrograms.embedded, bucket),
            get(AttentionPrograms.leave, bucket.of_tokens),
            sampling_executables(programs, bucket, get),
            drafting_executables(programs, bucket, get),
        )
        for bucket in buckets
    }


class BothRolesPipeline(StepPipeline):
    """Runs the steps of all lanes of both roles."""

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None = None):
        config, names, meshes, templates, source = model
        self._programs = programs = BothRolesPrograms(templates, deployment, meshes)
        with load_progress(source, 2 + 2 * config.layers):
            ends = RoleWeights(source, programs.mesh)
            self._embedding, self._head = ends.add_ends(templates, names, ATTENTION_RULES)
            weights = RoleWeights(source, programs.union)
            for kind, first, stop in config.runs():
                attention, ffn = names.attention[first:stop], names.ffn[first:stop]
                block = templates.attention[kind]
                weights.add("attention", block, attention, ATTENTION_RULES, first)
                weights.add("ffn", templates.ffn[kind.ffn], ffn, programs.rules, first)
        weights.held += ends.held
        buckets, most = deployment_buckets(deployment), deployment.lanes
        steps = {(b, n): programs.step(b, n) for b in buckets for n in range(1, 1 + most)}
        self.executables = compile_all(steps)
        self._ends = compile_steps(_ends, programs, buckets)
        self._halves = _Halves(programs)
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(most, weights, slots, observer)

    def _clear(self) -> None:
        super()._clear()
        programs = self._programs
        self._pages: Sequence[jax.Array] = ()  # the old ones are free before there are new ones
        self._pages = [sharded_zeros(a.shape, a.dtype, a.sharding) for a in programs.pages]
        self._tokens = TokenLanes(programs, self._head)

    def kv_arrays(self, domain: int = 0) -> KVArrays:
        """The pages on the attention mesh."""
        return KVArrays(self._programs, True, self._own_pages, self._set_pages)

    def _own_pages(self) -> list[jax.Array]:
        # A program that a half is donated to takes the whole arrays along.
        self._apart = [self._halves.apart(array) for array in self._pages]
        return [self._halves.taken(array, PAGES_SPEC) for array in self._pages]

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        kinds = zip(pages, self._apart, self._programs.pages, strict=True)
        self._pages = [self._halves.joined(*each) for each in kinds]

    def _run(self, plans: Sequence[StepPlan]) -> list[Finished]:
        bucket = max((plan.bucket for plan in plans), key=lambda bucket: bucket.pages)
        slots, pages, steps, entered = self.slots, len(self._pages), [], []
        embedded, leave, sampling, drafting = self._ends[bucket]
        for plan in plans:
            batch, table = self._tokens.put(msgspec.structs.replace(plan, bucket=bucket))
            last, batch = self._tokens.begin(plan, drafting, batch)
            steps.append((last, batch, table))
            entered += [*steps[-1], embedded(*steps[-1], *self._embedding)]
        experts = [] if slots is None else [*slots.counts, *slots.tables]
        leaves = (leaf for block in self._weights.blocks for leaf in block)
        made = self.executables[bucket, len(plans)](
            *map(self._halves.spread, entered), *self._pages, *experts, *leaves
        )
        streams, state = made[: 2 * len(plans)], made[2 * len(plans) :]
        self._pages = state[:pages]
        if slots is not None:
            slots.counts = list(state[pages:])
        finished = []
        for plan, arrays, *stream in zip(plans, steps, streams[::2], streams[1::2], strict=True):
            x, answer = map(self._halves.taken, stream, (ROWS, PIECES))
            left = leave(x, *arrays[:2], answer, *self._head)
            end = self._tokens.end(plan, (sampling, drafting), arrays, tuple(left), (x, answer))
            finished.append(end[0])
        return finished


class _Halves:
    """Makes arrays of the mesh of both roles from those of the attention mesh, and takes the
    attention mesh's half of such arrays. Copies nothing.

    Each kind of array (shape, dtype and sharding) gets zeros for the ffn role's devices once.
    """

    def __init__(self, programs: BothRolesPrograms):
        self._programs = programs
        self._shards, self._assemble = fast_shards()
        self._known: dict[object, tuple[Assemble, Sequence[jax.Array]]] = {}

    def spread(self, array: jax.Array) -> jax.Array:
        """Returns an array of both roles, whose first half is this one, a row a DP group."""
        programs, shards, kind = self._programs, self._shards(array), _kind(array)
        if kind not in self._known:
            (first, *rest), dtype = array.shape, array.dtype
            zeros = np.zeros(shards[0].shape, dtype)
            others = [jax.device_put(zeros, device) for device in programs.union.devices[1].flat]
            sharding = programs.sharding(ROWS)
            self._known[kind] = self._assemble((2 * first, *rest), dtype, sharding), others
        assemble, zeros_there = self._known[kind]
        return assemble([*shards, *zeros_there])

    def apart(self, array: jax.Array) -> Sequence[jax.Array]:
        """Returns the ffn role's shards of an array of both roles."""
        return self._shards(array)[self._programs.mesh.size :]

    def joined(
        self, array: jax.Array, others: Sequence[jax.Array], both: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Returns an array of both roles that is made of this one and the ffn role's shards."""
        assemble = self._assemble(both.shape, both.dtype, both.sharding)
        return assemble([*self._shards(array), *others])

    def taken(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns the attention mesh's half of an array of both roles, which lies there so."""
        programs, kind = self._programs, (spec, *_kind(array))
        if kind not in self._known:
            (first, *rest), sharding = array.shape, cached_sharding(programs.mesh, spec)
            self._known[kind] = self._assemble((first // 2, *rest), array.dtype, sharding), []
        return self._known[kind][0](self._shards(array)[: programs.mesh.size])


def _kind(array: jax.Array) -> tuple[object, ...]:
    return array.shape, array.dtype, array.sharding

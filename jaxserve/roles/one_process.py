"""Drives steps as one program of both roles, in processes that have equally many devices of each
(`pipeline: step`)."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import ATTENTION_RULES, cached_sharding, sharded_zeros, zeros_of
from jaxserve.roles.attention_programs import add_modules
from jaxserve.roles.compilation import Get
from jaxserve.roles.expert_slots import open_slots
from jaxserve.roles.lane_steps import StepPipeline, options
from jaxserve.roles.layout import Bucket
from jaxserve.roles.one_program import BothRolesPrograms
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.pooled_experts import PooledWeights
from jaxserve.roles.program import PIECES, ROWS, Arrays
from jaxserve.roles.token_lanes import TokenLanes
from jaxserve.roles.weights import RoleWeights, load_progress
from jaxserve.roles.worker import Observer


def ends(programs: BothRolesPrograms, buckets: Sequence[Bucket], get: Get) -> Any:
    """Collects the programs of the attention mesh before and after the layers of each bucket's
    steps: `embedded`, `leave`, and `lane_steps.options`."""
    makes = BothRolesPrograms.embedded, BothRolesPrograms.leave
    return {
        bucket: (*(get(make, bucket.of_tokens) for make in makes), *others)
        for bucket, others in options(programs, buckets, get).items()
    }


class BothRolesPipeline(StepPipeline):
    """Runs the steps of all lanes of both roles."""

    _programs: BothRolesPrograms
    _pooled: PooledWeights | None = None

    def __init__(self, model: OpenModel, deployment: Deployment, observer: Observer | None = None):
        config, names, meshes, templates, source = model
        if (count := jax.process_count()) > 1 and not deployment.shares_processes(count):
            raise ConfigError(f"pipeline = step: each of {count} processes needs both roles")
        self._programs = programs = BothRolesPrograms(templates, deployment, meshes)
        self._pages: list[jax.Array] = []
        with load_progress(source, 2 + 2 * config.all_layers):
            of_ends = RoleWeights(source, programs.mesh)
            self._embedding, self._head = of_ends.add_ends(templates, names, ATTENTION_RULES)
            modules = add_modules(of_ends, templates, names)
            weights = RoleWeights(source, union := programs.union)
            if (shared := programs.shared) is not None:
                self._pooled = weights = PooledWeights(shared, model, union, self._pages)
            for run in programs.runs:
                kind, first, stop, *_ = run
                attention, ffn = names.attention[first:stop], names.ffn[first:stop]
                block = templates.attention[kind]
                weights.add("attention", block, attention, ATTENTION_RULES, first)
                if self._pooled is not None and kind.ffn.router:
                    self._pooled.add_experts(run, programs.rules)
                else:
                    weights.add("ffn", templates.ffn[kind.ffn], ffn, programs.rules, first)
        weights.held += of_ends.held
        self._compile(programs, ends, self._embedding, self._head, modules)
        self._halves = _Halves(programs)
        slots = open_slots(programs.experts, programs.banks, weights, names, source)
        super().__init__(deployment.lanes, weights, slots, observer)

    def renew(self) -> bool:
        """See `WholeSteps`. In pools a lost step has destroyed the experts as well: they are
        loaded again, where the latest moves have put them."""
        if self._pooled is not None:
            placements = {} if self.slots is None else self.slots.placements
            self._pooled.renew(self._programs.rules, placements)
        return super().renew()

    def _clear(self) -> None:
        super()._clear()
        programs, pools = self._programs, [] if self._pooled is None else self._pooled.halves
        self._pages.clear()  # the old ones are free before there are new ones
        self._pages += map(self._halves.with_empty, pools, programs.pages)
        self._pages += zeros_of(programs.pages[len(pools) :])
        pools.clear()
        self._tokens = TokenLanes(programs, self._head)

    def _own_pages(self) -> list[jax.Array]:
        # A program that a half is donated to takes the whole arrays along.
        self._apart = [self._halves.apart(array) for array in self._pages]
        specs = (array.sharding.spec for array in self._programs.all_pages)
        return [*map(self._halves.taken, self._pages, specs)]

    def _set_pages(self, pages: Sequence[jax.Array]) -> None:
        kinds = zip(pages, self._apart, self._programs.pages, strict=True)
        self._pages[:] = [self._halves.joined(*each) for each in kinds]

    def _step(self, bucket: Bucket, steps: Sequence[Arrays]) -> list[tuple[Arrays, Arrays]]:
        embedded, leave, *_ = self._ends[bucket]
        begun = [(*embedded(last, batch, *self._embedding), table) for last, batch, table in steps]
        streams = self._layers(bucket, 0, begun)
        lanes = zip(streams, steps, strict=True)
        return [(tuple(leave(*x, *step[:2], *self._head)), x) for x, step in lanes]

    def _layers(self, bucket: Bucket, module: int, steps: Sequence[Arrays]) -> list[Arrays]:
        step, leaves = self.executables[bucket, len(steps), module], sum(self._weights.blocks, ())
        made = step(*map(self._halves.spread, itertools.chain(*steps)), *self._state, *leaves)
        self._keep(made[len(steps) :])
        return [(self._halves.taken(x, ROWS),) for x in made[: len(steps)]]


class _Halves:
    """Makes arrays of the mesh of both roles from those of the attention mesh, and takes the
    attention mesh's half of such arrays. Copies nothing.

    Each kind of array (shape and dtype) gets zeros for the ffn role's devices once. Shards are
    those of this process, which has equally many devices of both roles.
    """

    def __init__(self, programs: BothRolesPrograms):
        self._programs, self._local = programs, len(programs.mesh.local_devices)
        self._shards, assemble = fast_shards()
        self._assemble, self._zeros = functools.cache(assemble), functools.cache(self._empty)
        self._rows = programs.sharding(ROWS)

    def spread(self, array: jax.Array) -> jax.Array:
        """Returns an array of both roles, whose first half is this one, a row a DP group."""
        shards, (first, *rest) = self._shards(array), array.shape
        whole = self._assemble((2 * first, *rest), array.dtype, self._rows)
        return whole([*shards, *self._zeros(shards[0].shape, array.dtype)])

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> list[jax.Array]:
        devices = self._programs.union.local_devices[self._local :]
        return [jax.device_put(np.zeros(shape, dtype), device) for device in devices]

    def apart(self, array: jax.Array) -> Sequence[jax.Array]:
        """Returns the ffn role's shards of an array of both roles."""
        return self._shards(array)[self._local :]

    def joined(
        self, array: jax.Array, others: Sequence[jax.Array], both: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Returns an array of both roles that is made of this one and the ffn role's shards."""
        whole = self._assemble(both.shape, both.dtype, both.sharding)
        return whole([*self._shards(array), *others])

    def with_empty(self, half: jax.Array, both: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array of both roles that is made of zeros and the ffn role's half."""
        own = cached_sharding(self._programs.mesh, PIECES)
        return self.joined(sharded_zeros(half.shape, half.dtype, own), self._shards(half), both)

    def taken(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns the attention mesh's half of an array of both roles, which lies there so."""
        (first, *rest), sharding = array.shape, cached_sharding(self._programs.mesh, spec)
        whole = self._assemble((first // 2, *rest), array.dtype, sharding)
        return whole(self._shards(array)[: self._local])

"""Puts host arrays that have a row a DP group on the mesh of the role that holds the groups."""

import jax
import numpy as np

from jaxserve.link.dispatch.copy import Put, fast_put
from jaxserve.mesh import cached_sharding
from jaxserve.roles.program import ROWS
from jaxserve.roles.step_arrays import LaneState
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.token_programs import TokenPrograms


class GroupPut:
    """Each DP group's row goes to the group's devices."""

    def __init__(self, programs: TokenPrograms):
        self._sharding = cached_sharding(programs.mesh, ROWS)
        self._groups, self._slots = programs.groups, programs.slots
        deployment = programs.deployment
        pages = deployment.scheduler.page_buckets[-1]
        self._lanes = [
            LaneState(self._groups, self._slots, pages, deployment.modules)
            for _ in range(deployment.lanes)
        ]
        own = self._sharding.addressable_devices_indices_map((self._groups,))
        self._own = [own[device] for device in programs.mesh.local_devices]  # each device's rows
        self._make_put = fast_put()
        self._puts: dict[tuple[tuple[int, ...], np.dtype], Put] = {}

    def __call__(self, plan: StepPlan) -> tuple[jax.Array, jax.Array]:
        """The batch array and page table of a lane's next plan: each comes here once, in order."""
        batch, table = self._lanes[plan.lane].step(plan)
        return self.rows(batch), self.rows(table)

    def last_tokens(self) -> jax.Array:
        """A lane's last tokens before its first step."""
        return self.rows(np.zeros((self._groups, self._slots), np.int32))

    def rows(self, array: np.ndarray) -> jax.Array:
        """An array with a row a DP group."""
        if self._make_put is None:
            return jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__)
        kind = array.shape, array.dtype
        put = self._puts.get(kind)
        if put is None:
            put = self._puts[kind] = self._make_put(*kind, self._sharding)
        return put([array[rows] for rows in self._own])

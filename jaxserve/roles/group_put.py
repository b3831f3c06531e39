"""Puts host arrays that have a row a DP group on the mesh of the role that holds the groups."""

import jax
import numpy as np

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
        self._lanes = [LaneState(self._groups, self._slots, pages) for _ in range(deployment.lanes)]

    def __call__(self, plan: StepPlan) -> tuple[jax.Array, jax.Array]:
        """The batch array and page table of a lane's next plan: each comes here once, in order."""
        arrays = tuple(self._lanes[plan.lane].step(plan))
        if jax.process_count() == 1:
            batch, table = jax.device_put(arrays, (self._sharding, self._sharding))
            return batch, table
        batch, table = map(self.rows, arrays)
        return batch, table

    def last_tokens(self) -> jax.Array:
        """A lane's last tokens before its first step."""
        return self.rows(np.zeros((self._groups, self._slots), np.int32))

    def rows(self, array: np.ndarray) -> jax.Array:
        """An array with a row a DP group."""
        if jax.process_count() == 1:
            return jax.device_put(array, self._sharding)
        return jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__)

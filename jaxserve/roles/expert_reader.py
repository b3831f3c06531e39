"""Experts from the checkpoint or from a running worker elsewhere, for slots that get them from no
device (xDeepServe §4.5, step 3).

Called by `expert_slots.py`. A device reads its own share of its own expert, quantised as when the
worker was loaded. At most one expert a device is in memory beside the slots, twice while it is
copied there.
"""

import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.sections import Experts
from jaxserve.mesh import Rules, cached_sharding
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.weights import LeafSource
from pallas_kernels.quantize import array_bytes


class ExpertReader:
    """Reads experts of a mesh, one a rank at a time, at the rate of moves.

    Args:
      names: of the checkpoint's tensors.
      rules: of the mesh.
    """

    def __init__(
        self,
        templates: ModelTemplates,
        settings: Experts,
        names: CheckpointNames,
        source: LeafSource,
        mesh: Mesh,
        rules: Rules,
    ):
        self._templates, self._names, self._source = templates, names, source
        self._mesh, self._rules = mesh, rules
        self._from_peers = settings.source == "peer"
        self._bytes_per_second = settings.move_gb_per_second * 1e9

    def read(self, layer: int, experts: Sequence[int]) -> tuple[jax.Array, ...]:
        """The leaves of one expert a rank, as `ExpertPrograms.room`; waits for them.

        Args:
          experts: of every rank; below 0: none.

        Raises:
          CheckpointError, OSError: it cannot be read.
        """
        template = self._templates.of_experts(tuple(experts))
        shardings = [cached_sharding(self._mesh, spec) for spec in template.specs(self._rules)]
        source = self._source if self._from_peers else self._source.storage
        source.on_read = lambda size: None
        leaves = []
        for leaf in source.leaves(template, self._names.ffn[layer], shardings):
            leaves.append(leaf)
            time.sleep(array_bytes(leaf.shape, leaf.dtype) / self._bytes_per_second)
        return tuple(leaves)

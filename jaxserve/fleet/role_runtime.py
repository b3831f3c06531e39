"""The beginning of a runtime of a single role (`link.transport: pull`): model, mesh and hello.

Each runtime sees its own devices alone. `attention_runtime.py` and `ffn_runtime.py` go on from
here.
"""

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment, check_slice
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.fleet.agreement import deployment_facts
from jaxserve.fleet.computed_formats import computed_formats, versioned
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.session.channel import Deadlines
from jaxserve.link.session.hello import Hello, make_hello
from jaxserve.mesh import ATTENTION_AXES, FFN_AXES, by_process, mesh_rows
from jaxserve.model.matrix_formats import placed
from jaxserve.roles.capacity import Sizes, check_memory
from jaxserve.roles.compilation import use_compilation_cache
from pallas_kernels.coverage import refuse_fallbacks

if TYPE_CHECKING:
    from jaxserve.fleet.prepared import Prepared
    from jaxserve.model.ffn.block import FFNTemplates

SWITCH_SECONDS = 2e-4
"""Longest wait of a link's threads for the interpreter while another one computes. With Python's 5
ms, the engine's thread delays the threads that send and receive its messages."""
AGREED = ("dtype", "ffn.weights", "ffn.expert_rows", "model", "weights")
"""Facts of the deployment that decide an ffn worker's numbers, beside the contract's."""


def role_mesh(deployment: Deployment, role: Role) -> Mesh:
    """Makes the mesh of a role that has a runtime for itself.

    Raises:
      ConfigError: the runtime has too few devices.
    """
    there = by_process(jax.devices())
    a, f = deployment.attention, deployment.ffn
    sizes = {"attention": (a.dp, a.tp, ATTENTION_AXES), "ffn": (f.ep, f.tp, FFN_AXES)}
    rows, columns, axes = sizes[role]
    if len(there) < rows * columns:
        raise ConfigError(
            f"{role}.{axes[0]} {rows} x {role}.{axes[1]} {columns} = {rows * columns} devices, but "
            f"this runtime has {len(there)}"
        )
    if there[0].platform == "tpu":
        check_slice(len(there), {role: rows * columns})
    return Mesh(np.array(mesh_rows(there, rows, columns, role)), axes)


class RoleRuntime(NamedTuple):
    """One role in a runtime of its own, before anything is loaded."""

    config: ModelConfig
    names: CheckpointNames
    mesh: Mesh
    contract: Contract
    deployment: Deployment
    role: Role
    instance: int = 0
    """Number, among the ffn workers that share the ffn role (`ffn.instances`), of this one or of
    the one at the other end of a link."""
    templates: "Callable[..., FFNTemplates] | None" = None
    """Makes the templates of an ffn worker that has some of the experts; None: it has all."""
    executables: Any = None
    """Programs of the role that this process compiled as a spare; None: none."""

    @classmethod
    def of(
        cls, config: ModelConfig, names: CheckpointNames, deployment: Deployment, role: Role
    ) -> "RoleRuntime":
        """Makes the runtime for a model that is known already, on this runtime's devices."""
        sys.setswitchinterval(SWITCH_SECONDS)
        mesh = role_mesh(deployment, role)
        config = placed(config, mesh)
        return cls(config, names, mesh, Contract.of(config, deployment), deployment, role)

    @property
    def hello(self) -> Hello:
        """The introduction of this end of the link; waits until the weights are hashed."""
        known = deployment_facts(self.deployment)
        known["weights"] = revision(self.deployment.model).digest
        facts = {key: known[key] for key in AGREED}
        facts["instance"] = f"{self.instance} of {self.contract.instances}"
        facts |= {f"contract.{name}": str(value) for name, value in self.contract.facts().items()}
        formats = {
            f"link.{name}": (facts[f"contract.{name}"], computed_formats())
            for name in ("dispatch", "combine")
        }
        return make_hello(versioned(self.role), facts, formats=formats)


def open_role(
    deployment: Deployment,
    role: Role,
    sizes: Sizes,
    make: Callable[..., RoleRuntime] = RoleRuntime.of,
    prepared: "Prepared | None" = None,
) -> RoleRuntime:
    """Reads the model's configuration and checks that the role's part of it fits here.

    Exempts existing objects, mostly those of imports, from garbage collection, which otherwise
    takes a tenth of the time of tracing and lowering. `engine/runtime.py` ends the exemption.

    Args:
      sizes: computes the needs of the role.
      make: takes the arguments of `RoleRuntime.of`; makes the runtime.
      prepared: work that this process did as a spare; None: it was none.

    Raises:
      ConfigError, CheckpointError: it does not, or is not readable.
    """
    revision(deployment.model)
    use_compilation_cache()
    refuse_fallbacks(deployment.strict_kernels)
    runtime = make(*read_model(deployment), deployment, role)
    check_memory(runtime.config, runtime.deployment, {role: runtime.mesh.local_devices}, sizes)
    gc.freeze()
    return prepared.given_to(runtime) if prepared else runtime


def deadlines_of(deployment: Deployment) -> Deadlines:
    """The deadlines of the link's waits."""
    return Deadlines(answer=deployment.cluster.step_seconds, absent=deployment.link.absent_seconds)

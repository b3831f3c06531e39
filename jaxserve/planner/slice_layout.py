"""Whether hosts of a TPU slice have one role each or parts of both, by hops over its links.

Called by `launch`, which starts the first of `layouts`. Imports `mesh.py`, and with it JAX, for the
order of devices in the roles' meshes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.link.dispatch.route import Route
from jaxserve.mesh import by_process, role_groups
from jaxserve.model.ffn.traffic import (
    alltoall_moves,
    deployment_row_bytes,
    exchange_mesh,
    exchange_of,
    gather_moves,
    ranks_met,
)
from jaxserve.planner.fabric import rings
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.ici import Hops, SliceDevice, Torus, count


class Choice(NamedTuple):
    """A layout of the roles on a slice's hosts.

    Attributes:
      deployment: the deployment with this layout.
      shared: whether each host has parts of both roles.
      hops: its hops.
      weight: bytes times hops of a row in a layer.
    """

    deployment: Deployment
    shared: bool
    hops: Hops
    weight: float

    def __str__(self) -> str:
        kind = "hosts with both roles" if self.shared else "a role a host"
        return f"{kind}: {self.hops}; {self.weight / 1e3:.0f} KB x hops a row and layer"


GAIN = 0.9
"""Hosts have both roles only below this part of the other layout's bytes times hops, since their
processes enqueue the programs of both roles."""


def layouts(
    deployment: Deployment,
    config: ModelConfig,
    hardware: Hardware,
    sizes: tuple[int, ...],
    hosts: int,
) -> list[Choice]:
    """Returns the possible layouts on a slice, the one to choose first.

    There is one where the deployment fixes the processes of its roles, and none where it has other
    roles than one attention and one ffn mesh on the whole slice.

    Args:
      sizes: chips along each dimension.
      hosts: number of hosts.
    """
    torus = Torus(sizes, rings(hardware, sizes))
    devices = torus.devices(hosts, hardware.jax_devices)
    one_pair = deployment.topology.has("ffn") and deployment.runtime_domains == 1
    if not one_pair or hosts == 1 or len(devices) != deployment.devices:
        return []
    fixed = deployment.attention.processes or deployment.ffn.processes
    tried = [deployment] if fixed else [_divided(deployment, n) for n in (0, hosts)]
    found = [_counted(each, config, torus, devices, hosts) for each in tried if _fits(each, hosts)]
    return sorted(found, key=lambda choice: choice.weight / (GAIN if choice.shared else 1))


def _fits(deployment: Deployment, hosts: int) -> bool:
    """Returns whether all hosts have equal parts of the roles."""
    if deployment.shares_processes(hosts):
        return not (deployment.attention.devices % hosts or deployment.ffn.devices % hosts)
    return bool(deployment.separate_splits(hosts))


def _counted(
    deployment: Deployment,
    config: ModelConfig,
    torus: Torus,
    devices: Sequence[SliceDevice],
    hosts: int,
) -> Choice:
    (attention,), ffn = role_groups(deployment, by_process(devices))
    groups = [[[device.coords for device in row] for row in rows] for rows in (attention, ffn)]
    a, f = (list(itertools.chain.from_iterable(rows)) for rows in groups)
    pairs = [
        (a[piece], f[place])
        for leg in Route(len(a), len(f), deployment.ffn.instances).legs
        for piece, place in zip(leg.attention, leg.ffn, strict=True)
    ]
    hops = count(torus, pairs, *groups)
    weight = hops.weighed(*row_bytes(config, deployment))
    return Choice(deployment, deployment.shares_processes(hosts), hops, weight)


def _divided(deployment: Deployment, processes: int) -> Deployment:
    attention = msgspec.structs.replace(deployment.attention, processes=processes)
    ffn = msgspec.structs.replace(deployment.ffn, processes=processes)
    return msgspec.structs.replace(deployment, attention=attention, ffn=ffn)


def row_bytes(config: ModelConfig, deployment: Deployment) -> tuple[float, float, float]:
    """Returns bytes of a row in a layer: of dispatch and combine, and that a device receives in the
    tp collectives of attention and of ffn."""
    row, mesh = deployment_row_bytes(config, deployment), exchange_mesh(deployment)
    tp = deployment.attention.tp
    attention = 2.0 * (tp - 1) / tp * config.d_model * 2
    if mesh.tensor == 1:
        return row.packed + row.result, attention, 0.0
    met = ranks_met(mesh, config.experts, config.top_k) if config.experts else 1.0
    if config.experts and exchange_of(config, deployment) == "alltoall":
        moved = alltoall_moves(mesh, row, met / mesh.ranks, config.shared_d_ff > 0)
    else:
        moved = gather_moves(mesh, row)
    return row.packed + row.result, attention, moved.there + moved.back

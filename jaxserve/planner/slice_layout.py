"""Whether hosts of a TPU slice have one role each or parts of both, by hops over its links.

Called by `launch`, which starts the first of `slice_layouts`, and by `serve --check`. Imports
`mesh.py`, and with it JAX, for the order of devices in the roles' meshes.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.route import Route
from jaxserve.mesh import by_process, role_groups
from jaxserve.model.ffn.traffic import (
    alltoall_moves,
    exchange_mesh,
    exchange_of,
    gather_moves,
    ranks_met,
)
from jaxserve.model.row_width import deployment_row_bytes
from jaxserve.planner.fabric import rings
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.ici import Hops, SliceDevice, Torus, count
from jaxserve.planner.machines import tpu_slice


class Choice(NamedTuple):
    """A layout of the roles on a slice's hosts.

    Attributes:
      topology: the slice.
      deployment: the deployment with this layout.
      shared: whether each host has parts of both roles.
      hops: its hops.
      weight: bytes times hops of a row in a layer.
    """

    topology: str
    deployment: Deployment
    shared: bool
    hops: Hops
    weight: float

    def __str__(self) -> str:
        kind = "hosts with both roles" if self.shared else "a role a host"
        weight = f"{self.weight / 1e3:.0f} KB x hops a row and layer"
        return f"{self.topology}, {kind}: {self.hops}; {weight}"


GAIN = 0.9
"""Hosts have both roles only below this part of the other layout's bytes times hops, since their
processes enqueue the programs of both roles."""


def slice_layouts(deployment: Deployment, config: ModelConfig, hardware: str = "") -> list[Choice]:
    """Returns the possible layouts on a TPU slice, the one to choose first.

    The deployment has one layout where it fixes the processes of its roles. It has none on other
    hardware, or with other roles than one attention and one ffn mesh, of one runtime, on the whole
    slice.

    Args:
      hardware: name for roles that name none.

    Raises:
      ConfigError: no slice has that many chips.
    """
    name = deployment.attention.hardware or hardware
    kind = load_hardware(name) if name else None
    inside = deployment.topology.has("ffn") and not deployment.topology.crosses_runtimes
    if kind is None or kind.platform != "tpu" or not inside:
        return []
    there = tpu_slice(name, deployment.devices // kind.jax_devices)
    sizes, hosts = tuple(map(int, there.topology.split("x"))), there.hosts
    torus = Torus(sizes, rings(kind, sizes))
    devices = torus.devices(hosts, kind.jax_devices)
    if deployment.runtime_domains != 1 or hosts == 1 or len(devices) != deployment.devices:
        return []
    topology = f"{name} {there.topology}"
    fixed = deployment.attention.processes or deployment.ffn.processes
    tried = [deployment] if fixed else [_divided(deployment, n) for n in (0, hosts)]
    found = [
        Choice(topology, *_counted(each, config, torus, devices, hosts))
        for each in tried
        if _fits(each, hosts)
    ]
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
) -> tuple[Deployment, bool, Hops, float]:
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
    return deployment, deployment.shares_processes(hosts), hops, weight


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
        moved = alltoall_moves(mesh, row, met / mesh.ranks, config.moe.d_ff > 0)
    else:
        moved = gather_moves(mesh, row)
    return row.packed + row.result, attention, moved.there + moved.back


def main() -> None:
    """Prints the hops of the deployment that `serve --check` writes to the input as JSON."""
    deployment = msgspec.json.decode(sys.stdin.buffer.read(), type=Deployment)
    config, _ = read_model(deployment)
    try:
        lines = [str(each) for each in slice_layouts(deployment, config)]
    except ConfigError as error:
        lines = [str(error)]
    if len(lines) > 1:
        lines.append("`launch` takes the first; attention.processes and ffn.processes fix one")
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()

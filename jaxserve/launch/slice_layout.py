"""Whether hosts of a TPU slice have one role each or parts of both, by hops over its links.

Messages take the dimensions one after the other, the shorter way round where a dimension is a ring.
Called by `launch`, which starts the first of `slice_layouts`, and by `serve --check`. Imports
`mesh.py`, and with it JAX, for the order of devices in the roles' meshes.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.launch.workloads import tpu_slice
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
from jaxserve.planner.hardware import load_hardware

Place = tuple[int, ...]
"""Coordinates of a chip."""
HOST = (2, 2, 1)
"""Chips of a host along the dimensions, in slices of several hosts, as libtpu numbers them."""


class SliceDevice(NamedTuple):
    """A JAX device of a slice, with the attributes that meshes are made by."""

    coords: Place
    process_index: int
    device_kind: str = "TPU"
    slice_index: int = 0


class Torus(NamedTuple):
    """The links of a slice.

    Attributes:
      sizes: chips along each dimension.
      rings: whether the two ends of a dimension are joined.
    """

    sizes: Place
    rings: tuple[bool, ...]

    def devices(self, hosts: int, cores: int) -> list[SliceDevice]:
        """Returns a slice's devices host by host, as libtpu numbers them.

        Args:
          hosts: number of hosts; one has all chips.
          cores: JAX devices of a chip.
        """
        box = HOST[: len(self.sizes)] if hosts > 1 else self.sizes
        grid = tuple(size // side for size, side in zip(self.sizes, box, strict=True))
        return [
            SliceDevice(tuple(b * s + i for b, s, i in zip(at, box, inner, strict=True)), number)
            for number, at in enumerate(_places(grid))
            for inner in _places(box)
            for _ in range(cores)
        ]

    def path(self, source: Place, target: Place) -> Iterator[tuple[Place, Place]]:
        """Yields the links from one chip to another, each as its two ends."""
        here = list(source)
        for axis, size in enumerate(self.sizes):
            ahead = (target[axis] - here[axis]) % size
            forward = target[axis] > here[axis]
            if self.rings[axis]:
                forward = ahead <= size - ahead
            while here[axis] != target[axis]:
                before = tuple(here)
                here[axis] = (here[axis] + (1 if forward else -1)) % size
                yield before, tuple(here)


class Hops(NamedTuple):
    """Hops of a layout on a slice.

    Attributes:
      crossing: mean from an attention device to the ffn device that its rows go to.
      busiest: messages of a layer, one a piece, over the busiest link and direction.
      attention_group: longest hop between neighbours in the ring of an attention tp group.
      ffn_group: the same of an ffn tp group.
    """

    crossing: float
    busiest: int
    attention_group: int
    ffn_group: int

    def weighed(self, crossing_bytes: float, attention_bytes: float, ffn_bytes: float) -> float:
        """Returns bytes times hops for a row of a layer.

        Args:
          crossing_bytes: of dispatch and combine.
          attention_bytes, ffn_bytes: of the tp collectives of either role.
        """
        inside = attention_bytes * self.attention_group + ffn_bytes * self.ffn_group
        return crossing_bytes * self.crossing + inside

    def __str__(self) -> str:
        return (
            f"{self.crossing:.2f} hops from attention to ffn, {self.busiest} messages on the "
            f"busiest link; longest hop in a tp group: attention {self.attention_group}, ffn "
            f"{self.ffn_group}"
        )


def count(
    torus: Torus,
    pairs: Sequence[tuple[Place, Place]],
    attention: Sequence[Sequence[Place]],
    ffn: Sequence[Sequence[Place]],
) -> Hops:
    """Counts the hops of a layout.

    Args:
      pairs: chips of an attention device and of the ffn device that its rows go to.
      attention, ffn: the tp groups of each role, in the order of their rings.
    """
    paths = [list(torus.path(*pair)) for pair in pairs]
    links = Counter(itertools.chain.from_iterable(paths))
    return Hops(
        sum(map(len, paths)) / len(paths),
        max(links.values(), default=0),
        _longest(torus, attention),
        _longest(torus, ffn),
    )


def _longest(torus: Torus, groups: Sequence[Sequence[Place]]) -> int:
    """Returns the longest hop between neighbours of a group, its two ends included."""
    rings = (itertools.pairwise([*group, group[0]]) for group in groups)
    hops = (len(list(torus.path(*pair))) for ring in rings for pair in ring)
    return max(hops, default=0)


def _places(sizes: Place) -> Iterator[Place]:
    """Yields the places of a grid, the first dimension fastest."""
    for place in itertools.product(*map(range, reversed(sizes))):
        yield place[::-1]


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
    there = tpu_slice(name, kind, deployment.devices)
    sizes, hosts = tuple(map(int, there.topology.split("x"))), there.hosts
    torus = Torus(sizes, kind.rings(sizes))
    devices = torus.devices(hosts, kind.jax_devices)
    if deployment.runtime_domains != 1 or hosts == 1 or len(devices) != deployment.devices:
        return []
    fixed = deployment.attention.processes or deployment.ffn.processes
    found = []
    for made in [deployment] if fixed else [_divided(deployment, n) for n in (0, hosts)]:
        shared = made.shares_processes(hosts)
        if shared and (made.attention.devices % hosts or made.ffn.devices % hosts):
            continue  # hosts have unequal parts of the roles
        if shared or made.separate_splits(hosts):
            hops = _hops(made, torus, devices)
            weight = hops.weighed(*row_bytes(config, made))
            found.append(Choice(f"{name} {there.topology}", made, shared, hops, weight))
    return sorted(found, key=lambda choice: choice.weight / (GAIN if choice.shared else 1))


def _hops(deployment: Deployment, torus: Torus, devices: Sequence[SliceDevice]) -> Hops:
    (attention,), ffn = role_groups(deployment, by_process(devices))
    groups = [[[device.coords for device in row] for row in rows] for rows in (attention, ffn)]
    a, f = (list(itertools.chain.from_iterable(rows)) for rows in groups)
    pairs = [
        (a[piece], f[place])
        for leg in Route(len(a), len(f), deployment.ffn.instances).legs
        for piece, place in zip(leg.attention, leg.ffn, strict=True)
    ]
    return count(torus, pairs, *groups)


def _divided(deployment: Deployment, processes: int) -> Deployment:
    roles = {
        role: msgspec.structs.replace(getattr(deployment, role), processes=processes)
        for role in ("attention", "ffn")
    }
    return msgspec.structs.replace(deployment, **roles)


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

"""Shapes of TPU slices; bandwidth of a device's fast link, a switch or a torus, when many devices
use it at once; and the seconds in which the devices of the ffn role exchange a layer's rows.

Called by `stages.py`, and by `launch` and `slice_layout.py` for slices. The bytes are those of
`model/ffn/traffic.py`, which the engine runs by; between islands of the fast link they cross the
network. A switch (NVLink) gives every device its bandwidth, whatever it talks to. On a torus (TPU)
a device has a link to each neighbour, so two far parts of a slice share the links between them.
Knows hardware, not models.
"""

import math
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.model.ffn.traffic import ExchangeMesh, alltoall_moves, gather_moves
from jaxserve.model.row_width import RowBytes
from jaxserve.planner.hardware import Hardware, TpuNames

LARGEST = 4096
"""Chips of the largest slice that Google Cloud lists by its dimensions."""


def shape(hardware: Hardware, devices: int) -> tuple[int, ...]:
    """Chips along each dimension of a slice, ascending: 16 chips are 4 × 4, or 2 × 2 × 4."""
    sizes = [1] * hardware.torus
    left = -(-devices // hardware.jax_devices)
    while left > 1:
        sizes.sort()
        sizes[0] *= 2
        left = -(-left // 2)
    return tuple(sorted(sizes))


def hops(hardware: Hardware, devices: int) -> int:
    """Links between the two devices of a slice that are farthest from each other; 0 with a
    switch."""
    if not hardware.torus:
        return 0
    sizes = shape(hardware, devices)
    return sum(size // 2 if _ring(hardware, sizes, size) else size - 1 for size in sizes)


def gather_bandwidth(hardware: Hardware, devices: int) -> float:
    """Bytes/s that every device receives while all get the same: the links of a chip in the
    corner, which without a ring has one a dimension."""
    if not hardware.torus or devices <= hardware.jax_devices:
        return hardware.link
    sizes = shape(hardware, devices)
    return _link(hardware) * sum(1 + _ring(hardware, sizes, size) for size in sizes if size > 1)


def alltoall_bandwidth(hardware: Hardware, devices: int) -> float:
    """Bytes/s that every device receives in an all-to-all; half of the bytes cross the middle of
    the slice."""
    if not hardware.torus or devices <= hardware.jax_devices:
        return hardware.link
    across = 4 * middle_bandwidth(hardware, devices) / devices
    return min(across, gather_bandwidth(hardware, devices))


def middle_bandwidth(hardware: Hardware, devices: int) -> float:
    """Bytes/s, one way, between the two halves of a slice; unlimited with a switch.

    8 × 8 TPU v6e: eight links of 100 GB/s, which is 25 GB/s a chip of either half.
    """
    if not hardware.torus:
        return math.inf
    if devices <= hardware.jax_devices:
        return hardware.link
    sizes = shape(hardware, devices)
    links = math.prod(sizes[:-1]) * (1 + _ring(hardware, sizes, sizes[-1]))
    return links * hardware.jax_devices * _link(hardware)


def rings(hardware: Hardware, sizes: tuple[int, ...]) -> tuple[bool, ...]:
    """Returns for each dimension of a slice whether its two ends are joined."""
    return tuple(_ring(hardware, sizes, size) for size in sizes)


def _ring(hardware: Hardware, sizes: tuple[int, ...], size: int) -> bool:
    """Whether a dimension's ends are joined. In three dimensions either all are, or none."""
    needed = sizes if hardware.torus == 3 else (size,)
    return all(each % hardware.ring == 0 for each in needed)


def _link(hardware: Hardware) -> float:
    """Bytes/s of a JAX device, one way, over one of its chip's links."""
    return hardware.link / (2 * hardware.torus)


class TpuSlice(NamedTuple):
    """A slice: `hosts` machines of `chips_per_host` chips each."""

    kind: TpuNames
    topology: str
    hosts: int
    chips_per_host: int

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def accelerator_type(self) -> str:
        """Name of the slice in `gcloud compute tpus`, like `v6e-64`."""
        return f"{self.kind.slice_type}-{self.chips * self.kind.counts}"


def tpu_slice(name: str, hardware: Hardware, chips: int) -> TpuSlice:
    """Returns the slice with `chips` chips.

    Args:
      name: name of the hardware, for messages.
      hardware: a JAX device of it.

    Raises:
      ConfigError: no such slice exists; lists the existing slices.
    """
    if hardware.tpu is None:
        raise ConfigError(f"hardware {name}: its file does not say how clusters name it (`tpu`)")
    most, flat = min(LARGEST, hardware.link_devices // hardware.jax_devices), hardware.torus == 2
    known = [1] * flat + [4 << power for power in range(11) if 4 << power <= most]
    if chips not in known:
        raise ConfigError(f"{chips} chips of {name}: there are slices of {str(known)[1:-1]}")
    sizes = shape(hardware, chips * hardware.jax_devices)
    whole = chips if flat and chips <= 8 else 4
    # A dimension of one chip comes last: 2x2x1.
    text = "x".join(map(str, sizes if sizes[0] > 1 else sizes[::-1]))
    return TpuSlice(hardware.tpu, text, chips // whole, whole)


def gather_seconds(
    hardware: Hardware, mesh: ExchangeMesh, row: RowBytes, *, brought: bool
) -> tuple[float, float]:
    """Seconds there and back of a device's row in a gather, at the peak of link and network.
    Between islands of the fast link a row moves once, and the fast link spreads it then.

    Args:
      brought: whether the link between the roles has brought the rows to every island, and takes
        the islands' results in the model's format from there (`Assumptions.broadcast`).
    """
    link = gather_bandwidth(hardware, mesh.ranks * mesh.tensor)
    far, moved = mesh.peers / _near(hardware, mesh) - 1, gather_moves(mesh, row)
    network = math.inf if brought else hardware.network

    def seconds(whole: float, size: int) -> float:
        return (whole - far * size) / link + far * size / network

    return seconds(moved.there, row.packed), seconds(moved.back, row.result)


def alltoall_seconds(
    hardware: Hardware, mesh: ExchangeMesh, row: RowBytes, reached: float, *, shared: bool
) -> tuple[float, float]:
    """Seconds there and back of a device's row in an all-to-all, at the peak of link and network,
    which are busy at once. A row moves as often as ranks need it.

    Args:
      reached: part of the ranks that a row goes to.
      shared: whether there is a shared expert.
    """
    link = alltoall_bandwidth(hardware, mesh.ranks * mesh.tensor)
    far = reached * (mesh.peers - _near(hardware, mesh))
    moved = alltoall_moves(mesh, row, reached, shared=shared)

    def seconds(whole: float, size: int) -> float:
        return max((whole - far * size) / link, far * size / hardware.network)

    return seconds(moved.there, row.packed), seconds(moved.back, row.result)


def _near(hardware: Hardware, mesh: ExchangeMesh) -> int:
    """Devices with rows of their own on an island of the fast link."""
    return min(mesh.peers, hardware.link_devices // (1 if mesh.split else mesh.tensor) or 1)

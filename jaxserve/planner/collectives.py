"""Seconds in which the devices of the ffn role exchange a layer's rows.

Called by `stages.py`. The bytes are those of `model/ffn/traffic.py`, which the engine runs by; the
bandwidths are of the fast link (`fabric.py`) and, between its islands, of the network.
"""

from typing import NamedTuple

from jaxserve.model.ffn.traffic import (
    ExchangeKind,
    ExchangeMesh,
    RowBytes,
    alltoall_moves,
    gather_moves,
)
from jaxserve.planner.fabric import alltoall_bandwidth, gather_bandwidth
from jaxserve.planner.hardware import Hardware


class Rows(NamedTuple):
    """Rows of a layer's FFN on their way."""

    own: float
    """Rows of a device."""
    size: RowBytes
    reached: float
    """Part of the ranks that a row goes to; 1 in a gather."""
    shared: bool
    """Whether there is a shared expert."""


def exchange_bytes_seconds(
    kind: ExchangeKind, hardware: Hardware, mesh: ExchangeMesh, rows: Rows, *, brought: bool
) -> tuple[float, float]:
    """Seconds there and back at the peak of link and network, without latencies.

    Between islands of the fast link a gather moves a row once, and the fast link spreads it then;
    an all-to-all moves it as often as ranks there need it, and both networks are busy at once.

    Args:
      brought: whether the link between the roles has brought the rows to every island, and takes
        the islands' results in the model's format from there (`Assumptions.broadcast`).
    """
    row, devices = rows.size, mesh.ranks * mesh.tensor
    near = min(mesh.peers, hardware.link_devices // (1 if mesh.split else mesh.tensor) or 1)
    if kind == "alltoall":
        moved = alltoall_moves(mesh, row, rows.reached, shared=rows.shared)
        far, sizes = rows.reached * (mesh.peers - near), (row.packed, row.result)
        link = alltoall_bandwidth(hardware, devices)
        return (
            rows.own * _at_once(moved.there, far * sizes[0], link, hardware.network),
            rows.own * _at_once(moved.back, far * sizes[1], link, hardware.network),
        )
    moved = gather_moves(mesh, row)
    link, far = gather_bandwidth(hardware, devices), mesh.peers / near - 1
    there, back = (
        rows.own * rows.reached * (whole - far * size) / link
        + (0.0 if brought else rows.own * far * size / hardware.network)
        for whole, size in zip(moved, (row.packed, row.result), strict=True)
    )
    return there, back


def _at_once(whole: float, far: float, link: float, network: float) -> float:
    """Seconds of one row's bytes, of which `far` go over the network meanwhile."""
    return max((whole - far) / link, far / network)

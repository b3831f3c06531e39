"""Bytes that the exchanges of the ffn role move, and the choice of the one that moves less.

Called by the templates and programs, which run the chosen exchange, by `serve --check`, and by the
planner, which charges it. Bytes are those that a device receives for each row of its own; on
average it sends as many. Knows sizes, not arrays.
"""

from typing import Literal, NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig, Platform
from jaxserve.model.row_width import RowBytes, deployment_row_bytes

ExchangeKind = Literal["gather", "alltoall"]

WORTH = 0.5
"""`auto` takes the all-to-all where it moves at most this part of what the gather moves. The rest
pays for what bytes do not show: rows are sorted by rank and back, sizes go ahead of them, and
every rank reads the whole shared expert."""


class ExchangeMesh(NamedTuple):
    """The devices that exchange rows."""

    ranks: int
    """Ranks that the routed experts are divided over."""
    tensor: int
    """Devices of a rank, which share every expert's d_ff."""
    attention: int | None
    """Attention devices. Their rows arrive at the same number of these devices, or at all devices
    if the mesh is smaller. None: colocated, where the devices of a rank have the same rows."""
    shared: int = 0
    """Ranks that have the shared expert for themselves, and no routed ones."""
    whole: bool = False
    """Whether every device (or every rank whose devices have the same rows) has the whole shared
    expert for its own rows."""
    instances: int = 1
    """Equal parts of the ranks, each of which has all rows, and exchanges them inside."""

    @property
    def routed(self) -> int:
        """Ranks with routed experts."""
        return self.ranks - self.shared

    @property
    def split(self) -> bool:
        """Returns whether the devices of a rank have different rows."""
        return self.attention is not None

    @property
    def own(self) -> float:
        """Part of all rows that a device has room for."""
        if self.attention is None:
            return 1 / self.ranks
        devices = self.peers * self.instances
        return -(-self.attention // devices) * self.instances / self.attention

    @property
    def peers(self) -> int:
        """Devices with rows of their own, which they exchange."""
        return (self.ranks * self.tensor if self.split else self.ranks) // self.instances


class Moved(NamedTuple):
    """Bytes that a device receives for each row of its own, on average over routings."""

    there: float
    back: float

    @property
    def total(self) -> float:
        """Both ways."""
        return self.there + self.back


def reach(experts: int, top_k: int, parts: int) -> float:
    """Probability that a row has a chosen expert in a given one of `parts` equal parts of the
    experts, 1 − C(E − E/parts, k) / C(E, k), if all choices are equally likely. A router that
    chooses groups of experts first reaches fewer."""
    elsewhere = experts - experts / parts
    misses = 1.0
    for index in range(min(top_k, experts)):
        misses *= max(0.0, elsewhere - index) / (experts - index)
    return 1 - misses


def ranks_met(mesh: ExchangeMesh, experts: int, top_k: int) -> float:
    """Average number of ranks that a row goes to: those of its experts, and one for the shared
    expert if that has ranks of its own."""
    return mesh.routed * reach(experts, top_k, mesh.routed) + (mesh.shared > 0)


def gather_moves(mesh: ExchangeMesh, row: RowBytes) -> Moved:
    """Bytes of a gather: every row goes to every device, and parts of its sum come back."""
    others = mesh.peers - 1
    return Moved(others * row.packed, others * row.result + _tensor_sum(mesh, row))


def alltoall_moves(mesh: ExchangeMesh, row: RowBytes, reached: float, shared: bool) -> Moved:
    """Bytes of an all-to-all: a row goes to the ranks of its experts, and results return.

    Args:
      reached: the probability that a rank has one, mean over ranks (`ranks_met`).
      shared: whether there is a shared expert. The devices of a rank gather their rows for it, if
        they have different ones and it has no ranks of its own.
    """
    others = reached * (mesh.peers - 1)
    apart = mesh.shared or mesh.whole
    beside = mesh.tensor - 1 if shared and mesh.split and not apart else 0
    there = (others + beside) * row.packed
    return Moved(there, (others + beside) * row.result + _tensor_sum(mesh, row))


def choose(
    mesh: ExchangeMesh, row: RowBytes, reached: float, shared: bool, platform: Platform
) -> ExchangeKind:
    """Chooses the exchange of a layer with routed experts for `ffn.exchange: auto`.

    GPUs gather: XLA's all-to-all between their processes is experimental, and starts only where it
    was asked for and has passed a test.
    """
    if mesh.ranks == 1 or platform == "gpu":
        return "gather"
    apart = alltoall_moves(mesh, row, reached, shared).total
    return "alltoall" if apart <= WORTH * gather_moves(mesh, row).total else "gather"


def _tensor_sum(mesh: ExchangeMesh, row: RowBytes) -> float:
    """The devices of a rank that have the same rows add up their results."""
    return 0.0 if mesh.split else 2 * (mesh.tensor - 1) / mesh.tensor * (row.added or row.result)


def exchange_mesh(deployment: Deployment) -> ExchangeMesh:
    """Devices of the deployment's ffn role; in colocated mode DP groups are the ranks."""
    attention, ffn = deployment.attention, deployment.ffn
    shared = ffn.shared_ranks, ffn.shared == "whole"
    if deployment.topology.has("colocated"):
        return ExchangeMesh(attention.dp, attention.tp, None, *shared)
    return ExchangeMesh(ffn.ep, ffn.tp, attention.devices, *shared, ffn.instances)


def exchange_of(config: ModelConfig, deployment: Deployment) -> ExchangeKind:
    """Returns the exchange of layers with routed experts. Dense layers always gather, because every
    device has a part of their FFN."""
    if not config.experts:
        return "gather"
    if deployment.ffn.exchange != "auto":
        return deployment.ffn.exchange
    if deployment.topology.has("ffn") and deployment.link.route == "broadcast":
        return "gather"  # every row to every device is what was asked for
    mesh = exchange_mesh(deployment)
    row = deployment_row_bytes(config, deployment)
    reached = ranks_met(mesh, config.experts, config.top_k) / mesh.ranks
    return choose(mesh, row, reached, config.moe.d_ff > 0, config.platform)

"""What the exchanges of the ffn role move, in bytes, and which of them moves less: plain Python.

Called by the templates and programs, which run what is chosen here, by `serve --check`, and by the
planner, which charges it. Bytes are those that a device receives for each row of its own; on
average it sends as many. Knows sizes, not arrays.
"""

from typing import Literal, NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.model.row_width import result_words, row_words

ExchangeKind = Literal["gather", "alltoall"]

WORTH = 0.5
"""`auto` takes the all-to-all where it moves at most this part of what the gather moves. The rest
pays for what bytes do not show: rows are sorted by rank and back, sizes go ahead of them, and
every rank reads the whole shared expert."""

_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}


class ExchangeMesh(NamedTuple):
    """The devices that exchange rows."""

    ranks: int
    """Over which the routed experts are divided."""
    tensor: int
    """Devices of a rank, which share every expert's d_ff."""
    attention: int | None
    """Attention devices, whose rows arrive at as many of these devices, if there are not fewer.
    None: colocated, where the devices of a rank have the same rows."""
    shared: int = 0
    """Ranks that have the shared expert for themselves, and no routed ones."""
    whole: bool = False
    """Whether every device, or rank whose devices have the same rows, has all of it for its own."""
    instances: int = 1
    """Equal parts of the ranks, each of which has all rows, and exchanges them inside."""

    @property
    def routed(self) -> int:
        """The other ranks."""
        return self.ranks - self.shared

    @property
    def split(self) -> bool:
        """Whether the devices of a rank have different rows."""
        return self.attention is not None

    @property
    def own(self) -> float:
        """The part of all rows that a device has room for."""
        if self.attention is None:
            return 1 / self.ranks
        devices = self.peers * self.instances
        return -(-self.attention // devices) * self.instances / self.attention

    @property
    def peers(self) -> int:
        """Devices with rows of their own, which they exchange."""
        return (self.ranks * self.tensor if self.split else self.ranks) // self.instances


class RowBytes(NamedTuple):
    """Bytes of a row."""

    packed: int
    """On its way to the experts."""
    result: int
    """Of a result, or a part of its sum, on its way back."""
    added: int = 0
    """Of a part of a sum that is added up on the way, in the model's dtype; 0: as `result`."""


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
    for index in range(top_k):
        misses *= max(0.0, elsewhere - index) / (experts - index)
    return 1 - misses


def ranks_met(mesh: ExchangeMesh, experts: int, top_k: int) -> float:
    """To how many ranks a row goes, on average: those of its experts, and one that has the shared
    expert, if that has ranks of its own."""
    return mesh.routed * reach(experts, top_k, mesh.routed) + (mesh.shared > 0)


def gather_moves(mesh: ExchangeMesh, row: RowBytes) -> Moved:
    """Every row to every device, and parts of its sum back."""
    others = mesh.peers - 1
    return Moved(others * row.packed, others * row.result + _tensor_sum(mesh, row))


def alltoall_moves(mesh: ExchangeMesh, row: RowBytes, reached: float, shared: bool) -> Moved:
    """A row to the devices of those ranks that have an expert of it, and their results back.

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


def choose(mesh: ExchangeMesh, row: RowBytes, reached: float, shared: bool) -> ExchangeKind:
    """What `ffn.exchange: auto` means for a layer with routed experts."""
    if mesh.ranks == 1:
        return "gather"
    apart = alltoall_moves(mesh, row, reached, shared).total
    return "alltoall" if apart <= WORTH * gather_moves(mesh, row).total else "gather"


def _tensor_sum(mesh: ExchangeMesh, row: RowBytes) -> float:
    """The devices of a rank that have the same rows add up their results."""
    return 0.0 if mesh.split else 2 * (mesh.tensor - 1) / mesh.tensor * (row.added or row.result)


def exchange_mesh(deployment: Deployment) -> ExchangeMesh:
    """Of the deployment's ffn role; in colocated mode DP groups are the ranks."""
    attention, ffn = deployment.attention, deployment.ffn
    if deployment.mode == "colocated":
        return ExchangeMesh(attention.dp, attention.tp, None, ffn.shared_ranks, ffn.whole_shared)
    return ExchangeMesh(
        ffn.ep, ffn.tp, attention.devices, ffn.shared_ranks, ffn.whole_shared, ffn.instances
    )


def row_bytes(d_model: int, top_k: int, sent: str, dtype: str, returned: str = "") -> RowBytes:
    """Of rows that are sent in the format `sent` by a model in `dtype`, and whose results come back
    in `returned`: `int8`, or anything else for `dtype`."""
    size, result = _BYTES[sent], d_model * _BYTES[dtype]
    words = row_words(d_model, top_k, size, has_scale=size == 1)
    if returned == "int8":
        return RowBytes(words * size, result_words(d_model), added=result)
    return RowBytes(words * size, result)


def deployment_row_bytes(config: ModelConfig, deployment: Deployment) -> RowBytes:
    """Of the rows of layers with routed experts."""
    sent, returned = deployment.dispatch_format, deployment.combine_format
    return row_bytes(config.d_model, config.top_k, sent, deployment.dtype, returned)


def exchange_of(config: ModelConfig, deployment: Deployment) -> ExchangeKind:
    """How the deployment exchanges the rows of layers with routed experts. Dense layers, which
    every device has a part of, always gather."""
    if not config.experts:
        return "gather"
    if deployment.ffn.exchange != "auto":
        return deployment.ffn.exchange
    if deployment.mode == "afd" and deployment.link.route == "broadcast":
        return "gather"  # every row to every device is what was asked for
    mesh = exchange_mesh(deployment)
    row = deployment_row_bytes(config, deployment)
    reached = ranks_met(mesh, config.experts, config.top_k) / mesh.ranks
    return choose(mesh, row, reached, shared=config.shared_d_ff > 0)

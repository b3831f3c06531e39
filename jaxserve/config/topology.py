"""Roles of a deployment and the boundaries that its messages cross, as one value.

`Deployment.topology` and the planner's `Layout.topology` are such values. Code outside `config/`
asks them and compares no string of `mode` or `link.transport`.
"""

import functools
from typing import TYPE_CHECKING, Literal

import msgspec

Role = Literal["attention", "ffn"]
Mode = Literal["afd", "colocated"]
PlannedMode = Literal["afd", "ep", "tp"]
"""Modes of a planned layout: two meshes, or one that divides experts or all matrices."""


class Transport(msgspec.Struct, frozen=True):
    """Boundaries that a transport of messages crosses.

    Attributes:
      crosses_runtimes: joins two independent JAX runtimes, instead of two meshes of one.
      collective: copies are a program of all devices, which is compiled.
      may_shake_hands: between hosts of TPUs each copy may take a handshake.
    """

    crosses_runtimes: bool = False
    collective: bool = False
    may_shake_hands: bool = False


TRANSPORTS = {
    "auto": Transport(),
    "device_put": Transport(may_shake_hands=True),
    "ppermute": Transport(collective=True),
    "pull": Transport(crosses_runtimes=True),
}
"""Transports that `link.transport` may name."""

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]


class Topology(msgspec.Struct, frozen=True):
    """Meshes of a deployment, and the transport between them.

    Attributes:
      roles: roles whose sections size a mesh; the one mesh of a colocated deployment has
        attention's sizes.
      transport: the transport between the meshes; None if one mesh has both roles.
      splits_experts: experts are divided over ranks, each of which holds whole ones.
    """

    roles: tuple[Role, ...]
    transport: Transport | None = None
    splits_experts: bool = True

    def has(self, role: Role | Literal["colocated"]) -> bool:
        """Returns whether a worker of this role exists."""
        return role in (self.roles if self.transport else ("colocated",))

    @property
    def crosses_runtimes(self) -> bool:
        """True if attention and ffn live in runtimes of their own."""
        return self.transport is not None and self.transport.crosses_runtimes

    @property
    def separates_domains(self) -> bool:
        """True if each domain is a runtime, which starts, listens and fails by itself."""
        return self.transport is None or self.transport.crosses_runtimes


@functools.cache
def topology_of(mode: Mode | PlannedMode, transport: TransportName = "device_put") -> Topology:
    """Returns the topology of a deployment's or a layout's mode."""
    if mode == "afd":
        return Topology(("attention", "ffn"), TRANSPORTS[transport])
    return Topology(("attention",), splits_experts=mode != "tp")

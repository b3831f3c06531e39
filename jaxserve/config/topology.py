"""Roles of a deployment and the boundaries that its messages cross, as one value.

`Deployment.topology` and the planner's `Layout.topology` are such values. Code outside `config/`
asks them and compares no string of `mode` or `link.transport`.
"""

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec

Role = Literal["attention", "ffn"]
Mode = Literal["afd", "colocated"]
PlannedMode = Literal["afd", "ep", "tp"]
"""Modes of a planned layout: two meshes, or one that divides experts or all matrices."""


HOSTS_EACH = 8
"""Hosts to which one process hands on what the leader says to all."""


class Transport(msgspec.Struct, frozen=True):
    """Declaration of a transport of messages, at the top of its file in `link/transports/`.

    Attributes:
      crosses_runtimes: joins two independent JAX runtimes, instead of two meshes of one.
      collective: copies are a program of all devices, which is compiled.
      automatic: ends between which `link.transport: auto` takes it.
      falls_back_to: transport that takes its place between hosts of TPUs where its test fails.
      gb_per_second: what a process carries each way; 0: as much as the devices' fabric.
    """

    crosses_runtimes: bool = False
    collective: bool = False
    automatic: Literal["", "devices", "TPU hosts"] = ""
    falls_back_to: str = ""
    gb_per_second: float = 0.0


def _declared(file: Path) -> Transport:
    """Reads the line of a transport's file that declares it. The file is not imported: it imports
    JAX, which routers and faces do without."""
    lines = file.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith("TRANSPORT = "))
    call = cast(ast.Call, ast.parse(line.removeprefix("TRANSPORT = "), mode="eval").body)
    return Transport(**{str(one.arg): ast.literal_eval(one.value) for one in call.keywords})


_FILES = Path(__file__).parent.parent.joinpath("link", "transports").glob("[a-z]*.py")
TRANSPORTS = {"auto": Transport()} | {file.stem: _declared(file) for file in sorted(_FILES)}
"""Transports that `link.transport` may name: `auto`, and one for each file."""
INSIDE, BETWEEN = (
    [name for name, one in TRANSPORTS.items() if name != "auto" and one.crosses_runtimes is between]
    for between in (False, True)
)
"""Names of transports inside a runtime, and between runtimes."""

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
def topology_of(mode: Mode | PlannedMode, transport: TransportName = "auto") -> Topology:
    """Returns the topology of a deployment's or a layout's mode."""
    if mode == "afd":
        return Topology(("attention", "ffn"), TRANSPORTS[transport])
    return Topology(("attention",), splits_experts=mode != "tp")

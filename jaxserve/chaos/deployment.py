"""A deployment under test: `launch/local.py` with its processes, and a proxy in front of everybody
who listens elsewhere than where others dial.

Used by `storm.py`.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxserve.bench.launched import Launched, Process
from jaxserve.chaos.proxy import Proxy

SHIM = Path(__file__).resolve().parent / "clock_shim"
FACE, FIRST_FACE, FIRST_LINK = "jaxserve.server.processes.child", 1000, 2000
"""What the command line of a face process has, and numbers that the launcher does not give."""


class Deployment(Launched):
    """A launched deployment whose links and whose wall clock can be disturbed.

    Args:
      arguments: of the launcher.
      folder: for logs and the hook of the clock.
    """

    def __init__(self, arguments: Sequence[str], folder: Path):
        self.pages: list[Process] = []
        self.proxies: dict[str, Proxy] = {}
        self.clock = folder / "clock"
        path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        shim = {"PYTHONPATH": path, "JAXSERVE_CHAOS_CLOCK": str(self.clock)}
        super().__init__(arguments, folder, shim)

    def faces(self) -> list[Process]:
        """Processes of the router's faces (`server.processes`), which it starts itself."""
        found: list[Process] = []
        with contextlib.suppress(OSError):
            for thread in Path("/proc", f"{self.processes[0].pid}", "task").iterdir():
                for pid in (thread / "children").read_text().split():
                    if FACE in Path("/proc", pid, "cmdline").read_text():
                        number = FIRST_FACE + len(found)
                        found.append(Process(number, "face", "face process", int(pid)))
        return sorted(found, key=lambda face: face.pid)

    def all(self) -> list[Process]:
        """Every process, faces, too."""
        return [*self.processes.values(), *self.faces()]

    def roles(self) -> Mapping[str, list[Process]]:
        """Role → processes of it."""
        found: dict[str, list[Process]] = {}
        if faces := self.faces():
            found["face"] = faces
        for _, process in sorted(self.processes.items()):
            found.setdefault(process.role, []).append(process)
        if self.pages:
            found["pages"] = self.pages
        return found

    def end(self) -> int:
        """Ends everything; the launcher's exit code."""
        code = super().end()
        for proxy in self.proxies.values():
            proxy.close()
        return code

    def _new(self, process: Process) -> None:
        if process.role == "follower":
            return
        if process.listens:
            self.proxies[process.dialled] = Proxy(process.dialled, process.listens)
        if process.pages:
            link = Process(
                FIRST_LINK + process.number,
                "pages",
                f"pages link of {process.name}",
                process.pid,
                listens=process.pages,
                dialled=process.pages_dialled,
            )
            self.pages.append(link)
            self.proxies[link.dialled] = Proxy(link.dialled, link.listens)

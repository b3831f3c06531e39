"""A deployment under test: `launch/local.py` with its processes, everything that they say, and a
proxy in front of everybody who listens elsewhere than where others dial.

Used by `storm.py`.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.bench.workers import LAUNCHER
from jaxserve.chaos.proxy import Proxy
from jaxserve.errors import JaxserveError

SHIM = Path(__file__).resolve().parent / "clock_shim"
FACE, FIRST_FACE, FIRST_LINK = "jaxserve.server.processes.child", 1000, 2000
"""What the command line of a face process has, and numbers that the launcher does not give."""
LOOK_SECONDS = 0.02
END_SECONDS = 60.0

_STARTED = re.compile(
    r"process (?P<number>\d+): (?P<name>.*), pid (?P<pid>\d+)"
    r"(, listens on (?P<listens>[^\s,]+) for (?P<dialled>[^\s,]+))?"
    r"(, pages on (?P<pages>\S+) for (?P<pages_dialled>\S+))?$"
)


class ChaosError(JaxserveError):
    """The deployment could not be started, or did not come back; the message has its last words."""


class Line(NamedTuple):
    """A line that a process has printed; process -1 is the launcher."""

    at: float
    """Seconds of `time.monotonic`, when it was read."""
    process: int
    text: str


class Process(msgspec.Struct):
    """A process of the deployment.

    Attributes:
      number: of the launcher.
      role: "router", "prefill", "domain", "ffn", "follower" or "face"; "pages" is the link of a
        prefill worker to the domains, which can be disturbed like a process's.
      name: in words.
      pid: of now.
      starts: how often it was started.
      ready: how often it said that it is ready.
      listens, dialled: where it listens, and where others dial.
    """

    number: int
    role: str
    name: str
    pid: int
    starts: int = 1
    ready: int = 0
    listens: str = ""
    dialled: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is ready, as far as it says so itself; followers do not."""
        return self.role == "follower" or self.ready >= self.starts


class Deployment:
    """Starts the launcher and reads what is printed.

    Args:
      arguments: of the launcher.
      folder: for logs and the hook of the clock.
    """

    def __init__(self, arguments: Sequence[str], folder: Path):
        self.processes: dict[int, Process] = {}
        self.pages: list[Process] = []
        self.proxies: dict[str, Proxy] = {}
        self.lines: list[Line] = []
        self.clock = folder / "clock"
        self._changed = threading.Condition()
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._offsets: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._launcher = subprocess.Popen(
            [sys.executable, str(LAUNCHER), "--logs", str(self._logs), *arguments],
            env={**os.environ, "PYTHONPATH": path, "JAXSERVE_CHAOS_CLOCK": str(self.clock)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=each, daemon=True) for each in (self._read, self._tail)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def alive(self) -> bool:
        """Whether the launcher is."""
        return self._launcher.poll() is None

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

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until something of this object is true.

        Raises:
          ChaosError: it is not in time, or the launcher has ended.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: done() or not self.alive, seconds) or not done():
                raise ChaosError(f"{what} did not happen within {seconds:g} s\n{self.last_words()}")

    def whole(self) -> bool:
        """Whether all processes are there and ready."""
        return bool(self.processes) and all(each.whole for each in self.processes.values())

    def line(self, pattern: str, since: float = 0.0) -> Line | None:
        """The first line after a moment in which a pattern is found."""
        search = re.compile(pattern).search
        found = (line for line in list(self.lines) if line.at >= since and search(line.text))
        return next(found, None)

    def last_words(self) -> str:
        """The end of what was printed."""
        return "\n".join(f"  [{line.process}] {line.text}" for line in self.lines[-25:])

    def end(self) -> int:
        """Ends everything; the launcher's exit code."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        self._launcher.send_signal(signal.SIGTERM)
        try:
            code = self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            code = self._launcher.wait()
        for proxy in self.proxies.values():
            proxy.close()
        for reader in self._readers:
            reader.join(1.0)
        return code

    def _read(self) -> None:
        """The launcher's lines."""
        assert self._launcher.stderr is not None
        with self._launcher.stderr as lines:
            for line in lines:
                self._say(-1, line.rstrip("\n"))

    def _tail(self) -> None:
        """The lines of all logs."""
        while self.alive:
            for log in sorted(self._logs.iterdir(), key=lambda log: int(log.stem)):
                with log.open("rb") as file:
                    file.seek(self._offsets.get(log, 0))
                    data = file.read()
                self._offsets[log] = self._offsets.get(log, 0) + len(data)
                *lines, self._rest[log] = (self._rest.get(log, b"") + data).split(b"\n")
                for line in lines:
                    self._say(int(log.stem), line.decode(errors="replace"))
            time.sleep(LOOK_SECONDS)
        with self._changed:
            self._changed.notify_all()

    def _say(self, process: int, text: str) -> None:
        with self._changed:
            self.lines.append(Line(time.monotonic(), process, text))
            if process < 0 and (found := _STARTED.search(text)):
                self._started(found)
            elif process in self.processes and text.startswith("ready  "):
                self.processes[process].ready += 1
            self._changed.notify_all()

    def _started(self, found: re.Match[str]) -> None:
        number, pid = int(found["number"]), int(found["pid"])
        known = self.processes.get(number)
        if known is not None:
            known.pid, known.starts = pid, known.starts + 1
            return
        self.processes[number] = Process(
            number,
            role_of(found["name"]),
            found["name"],
            pid,
            listens=found["listens"] or "",
            dialled=found["dialled"] or "",
        )
        process = self.processes[number]
        if process.listens and process.role != "follower":
            self.proxies[process.dialled] = Proxy(process.dialled, process.listens)
        if (listens := found["pages"]) and process.role != "follower":
            link = Process(
                FIRST_LINK + number,
                "pages",
                f"pages link of {process.name}",
                pid,
                listens=listens,
                dialled=found["pages_dialled"],
            )
            self.pages.append(link)
            self.proxies[link.dialled] = Proxy(link.dialled, link.listens)


def role_of(name: str) -> str:
    """Of the launcher's name of a process."""
    if (found := re.search(r", process (\d+)$", name)) and int(found[1]):
        return "follower"
    if "role ffn" in name:
        return "ffn"
    if name.startswith("prefill"):
        return "prefill"
    return "router" if name == "router" else "domain"

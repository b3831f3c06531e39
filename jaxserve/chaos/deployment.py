"""A deployment under test: the launcher with its processes and everything that they print, and a
proxy in front of every process that listens elsewhere than others dial.

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

from jaxserve.bench.workers import BenchError
from jaxserve.chaos.proxy import Proxy
from jaxserve.commands.children import started

FACE, FIRST_FACE, FIRST_LINK = "jaxserve.server.face", 1000, 2000
"""Mark in the command line of a face process, and first numbers of faces and of links: the launcher
gives smaller ones."""
LOOK_SECONDS = 0.02
END_SECONDS = 60.0

_STARTED = re.compile(
    r"process (?P<number>\d+): (?P<name>.*), pid (?P<pid>\d+)"
    r"(, listens on (?P<listens>[^\s,]+) for (?P<dialled>[^\s,]+))?"
    r"(, pages on (?P<pages>\S+) for (?P<pages_dialled>\S+))?$"
)


class Line(NamedTuple):
    """Line that a process has printed; process -1 is the launcher."""

    at: float
    """`time.monotonic` when the line was read."""
    process: int
    text: str


class Process(msgspec.Struct):
    """Process of the deployment.

    Attributes:
      number: number that the launcher gave it.
      role: "router", "prefill", "domain", "attention", "ffn", "follower" or "face"; "pages" is the
        link of a prefill worker to the domains, which can be disturbed like a process's.
      name: name in words.
      pid: current process id.
      starts: number of its starts.
      ready: number of its reports that it is ready.
      listens, dialled: address at which it listens, and address that others dial.
      pages, pages_dialled: likewise for pages.
    """

    number: int
    role: str
    name: str
    pid: int
    starts: int = 1
    ready: int = 0
    listens: str = ""
    dialled: str = ""
    pages: str = ""
    pages_dialled: str = ""

    @property
    def whole(self) -> bool:
        """True if it has reported to be ready since its last start; followers report nothing."""
        return self.role == "follower" or self.ready >= self.starts


class RunningDeployment:
    """Starts the launcher and reads everything that is printed. Links can be disturbed.

    Args:
      arguments: arguments of the launcher.
      folder: folder for logs.

    Attributes:
      processes: processes by the launcher's number.
      pages: links of prefill workers to domains, described like processes.
      proxies: proxies by the address that others dial.
    """

    def __init__(self, arguments: Sequence[str], folder: Path):
        self.processes: dict[int, Process] = {}
        self.pages: list[Process] = []
        self.proxies: dict[str, Proxy] = {}
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        self._logs = folder / "logs"
        try:
            self._logs.mkdir()
        except OSError as error:
            raise BenchError(f"the folder for logs: {error}") from error
        self._offsets: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._launcher = started(
            [sys.executable, "-m", "jaxserve.launch.local", "--logs", str(self._logs), *arguments],
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
        """True while the launcher runs."""
        return self._launcher.poll() is None

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until `done`, which reads this object, returns True.

        Raises:
          BenchError: it does not in time, or the launcher has ended; the message has its last
            lines.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or not self.alive, seconds)
            if not done():
                until = f"within {seconds:g} s" if self.alive else "before the launcher ended"
                raise BenchError(f"{what} did not happen {until}\n{self.last_words()}")

    def whole(self) -> bool:
        """True if all processes have started and are ready."""
        return bool(self.processes) and all(each.whole for each in self.processes.values())

    def faces(self) -> list[Process]:
        """Face processes (`server.processes`), which the router starts itself."""
        found: list[Process] = []
        with contextlib.suppress(OSError):
            for thread in Path("/proc", f"{self.processes[0].pid}", "task").iterdir():
                for pid in (thread / "children").read_text().split():
                    if FACE in Path("/proc", pid, "cmdline").read_text():
                        number = FIRST_FACE + len(found)
                        found.append(Process(number, "face", "face process", int(pid)))
        return sorted(found, key=lambda face: face.pid)

    def all(self) -> list[Process]:
        """Lists every process, with the faces."""
        return [*self.processes.values(), *self.faces()]

    def roles(self) -> Mapping[str, list[Process]]:
        """Role → its processes."""
        found: dict[str, list[Process]] = {}
        if faces := self.faces():
            found["face"] = faces
        for _, process in sorted(self.processes.items()):
            found.setdefault(process.role, []).append(process)
        if self.pages:
            found["pages"] = self.pages
        return found

    def line(self, pattern: str) -> Line | None:
        """Finds the first line that has a pattern."""
        search = re.compile(pattern).search
        return next((line for line in list(self.lines) if search(line.text)), None)

    def addresses(self) -> Mapping[str, str]:
        """Addresses of the faces, "http" and "grpc" → host:port, once the deployment is whole."""
        line = self.line(r"^ready  .*http=")
        if line is None:
            raise BenchError(f"no process says where it serves\n{self.last_words()}")
        return dict(word.split("=", 1) for word in line.text.split() if "=" in word)

    def last_words(self) -> str:
        """Formats the last lines."""
        return "\n".join(f"  [{line.process}] {line.text}" for line in self.lines[-25:])

    def end(self) -> int:
        """Ends all processes; returns the launcher's exit code."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        self._launcher.send_signal(signal.SIGTERM)
        try:
            code = self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            code = self._launcher.wait()
        for reader in self._readers:
            reader.join(1.0)
        for proxy in self.proxies.values():
            proxy.close()
        return code

    def _read(self) -> None:
        """Reads the launcher's lines."""
        assert self._launcher.stderr is not None
        with self._launcher.stderr as lines, (self._logs.parent / "launcher.log").open("w") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self._say(-1, line.rstrip("\n"))

    def _tail(self) -> None:
        """Reads the lines of all logs."""
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
        self.processes[number] = process = Process(
            number,
            role_of(found["name"]),
            found["name"],
            pid,
            listens=found["listens"] or "",
            dialled=found["dialled"] or "",
            pages=found["pages"] or "",
            pages_dialled=found["pages_dialled"] or "",
        )
        # Followers have their leader's addresses, except in an ffn worker.
        if process.listens and process.dialled not in self.proxies:
            self.proxies[process.dialled] = Proxy(process.dialled, process.listens)
        if process.pages and process.role != "follower":
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


def role_of(name: str) -> str:
    """Tells the role of a process from the launcher's name for it."""
    if (found := re.search(r", process (\d+)$", name)) and int(found[1]):
        return "follower"
    if "role ffn" in name:
        return "ffn"
    if name.startswith("prefill"):
        return "prefill"
    if "role attention" in name:
        return "attention"
    return "router" if name == "router" else "domain"

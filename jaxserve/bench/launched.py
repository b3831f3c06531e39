"""A deployment that `launch/local.py` runs: its processes, and everything that they say.

Used by `kills.py` and `chaos/`.
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

from jaxserve.bench.workers import LAUNCHER, BenchError, prepare

LOOK_SECONDS = 0.02
END_SECONDS = 60.0

_STARTED = re.compile(
    r"process (?P<number>\d+): (?P<name>.*), pid (?P<pid>\d+)"
    r"(, listens on (?P<listens>[^\s,]+) for (?P<dialled>[^\s,]+))?"
    r"(, pages on (?P<pages>\S+) for (?P<pages_dialled>\S+))?$"
)


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
      role: "router", "prefill", "domain", "attention", "ffn", "follower" or "face"; "pages" is the
        link of a prefill worker to the domains, which can be disturbed like a process's.
      name: in words.
      pid: of now.
      starts: how often it was started.
      ready: how often it said that it is ready.
      listens, dialled: where it listens, and where others dial.
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
        """Whether it is ready, as far as it says so itself; followers do not."""
        return self.role == "follower" or self.ready >= self.starts


class Launched:
    """Starts the launcher and reads what is printed.

    Args:
      arguments: of the launcher.
      folder: for logs.
      environment: of all processes, on top of this one's.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ):
        self.processes: dict[int, Process] = {}
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        self._logs = folder / "logs"
        try:
            self._logs.mkdir()
        except OSError as error:
            raise BenchError(f"the folder for logs: {error}") from error
        self._offsets: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._launcher = subprocess.Popen(
            [sys.executable, str(LAUNCHER), "--logs", str(self._logs), *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone
            preexec_fn=prepare(),  # noqa: PLW1509  (no thread runs here)
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

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until something of this object is true.

        Raises:
          BenchError: it is not in time, or the launcher has ended; the message has the last words.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or not self.alive, seconds)
            if not done():
                until = f"within {seconds:g} s" if self.alive else "before the launcher ended"
                raise BenchError(f"{what} did not happen {until}\n{self.last_words()}")

    def whole(self) -> bool:
        """Whether all processes are there and ready."""
        return bool(self.processes) and all(each.whole for each in self.processes.values())

    def line(self, pattern: str) -> Line | None:
        """The first line in which a pattern is found."""
        search = re.compile(pattern).search
        return next((line for line in list(self.lines) if search(line.text)), None)

    def addresses(self) -> Mapping[str, str]:
        """Of the faces: "http" and "grpc" → host:port, once the deployment is whole."""
        line = self.line(r"^ready  .*http=")
        if line is None:
            raise BenchError(f"nobody says where it serves\n{self.last_words()}")
        return dict(word.split("=", 1) for word in line.text.split() if "=" in word)

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
        for reader in self._readers:
            reader.join(1.0)
        return code

    def _read(self) -> None:
        """The launcher's lines."""
        assert self._launcher.stderr is not None
        with self._launcher.stderr as lines, (self._logs.parent / "launcher.log").open("w") as log:
            for line in lines:
                log.write(line)
                log.flush()
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
        self._new(process)

    def _new(self, process: Process) -> None:
        """A process was started for the first time."""


def role_of(name: str) -> str:
    """Of the launcher's name of a process."""
    if (found := re.search(r", process (\d+)$", name)) and int(found[1]):
        return "follower"
    if "role ffn" in name:
        return "ffn"
    if name.startswith("prefill"):
        return "prefill"
    if "role attention" in name:
        return "attention"
    return "router" if name == "router" else "domain"

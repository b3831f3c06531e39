"""Hosts on one machine: network namespaces with names, joined by a bridge.

Each has addresses, ports and an /etc/hosts of its own; the test reaches them from outside. Needs
root and `ip`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[3]
ETC = Path("/etc/netns")
START_SECONDS, END_SECONDS = 900.0, 180.0


class Hosts:
    """Hosts by name, with their addresses and the processes that were started on them."""

    def __init__(self, names: Sequence[str], logs: Path):
        self._tag, self._logs = f"jx{os.getpid()}", logs
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
        self.addresses = {name: f"{self._net}.{n}" for n, name in enumerate(names, 1)}
        self._spaces = {name: f"{self._tag}-{n}" for n, name in enumerate(names, 1)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        bridge = self._tag
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {self._net}.254/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        known = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name} {name.partition('.')[0]}\n"
            for name, address in self.addresses.items()
        )
        for number, (name, space) in enumerate(self._spaces.items(), 1):
            _ip(f"netns add {space}")
            (ETC / space).mkdir(parents=True)
            (ETC / space / "hosts").write_text(known)
            _ip(f"link add {self._tag}v{number} type veth peer name eth0 netns {space}")
            _ip(f"link set {self._tag}v{number} master {bridge} up")
            _ip(f"-n {space} addr add {self.addresses[name]}/24 dev eth0")
            for device in ("lo", "eth0"):
                _ip(f"-n {space} link set {device} up")
            _ip(f"-n {space} route add default via {self._net}.254")

    def remove(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False)
            shutil.rmtree(ETC / space, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._tag], check=False)

    def on(self, name: str) -> list[str]:
        """The words before a command that runs it on a host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return ["ip", "netns", "exec", self._spaces[name], *named, name.partition(".")[0]]

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a command of `python` on a host, with these variables and few others."""
        log = (self._logs / f"{len(self.processes)}-{name}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [*self.on(name), sys.executable, *command[1:]],
                env=surroundings() | dict(environment),
                cwd=self._logs,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)

    def wait_ready(self, name: str, port: int = 8000) -> str:
        """Waits until a host serves; returns its URL."""
        url = f"http://{self.addresses[name]}:{port}"
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            gone = [process.poll() for process in self.processes]
            assert set(gone) == {None}, self.said()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    return url
            time.sleep(0.5)
        raise AssertionError(f"not ready within {START_SECONDS:g} s\n{self.said()}")

    def said(self) -> str:
        """The last lines of all logs."""
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self._logs.glob("*.log"))
        )


@contextlib.contextmanager
def hosts(names: Sequence[str], logs: Path) -> Iterator[Hosts]:
    """The hosts, for the time of the block; nothing stays behind."""
    made = Hosts(names, logs)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def surroundings() -> dict[str, str]:
    """The variables that processes inherit from the test."""
    kept = ("PATH", "HOME", "JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    here = {name: os.environ[name] for name in kept if name in os.environ}
    return here | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}


def can_make_hosts() -> bool:
    """Whether this machine allows network namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"jx{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, timeout=30)

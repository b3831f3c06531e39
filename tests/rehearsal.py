"""Rehearses the first day of a cluster: four hosts of two simulated devices in network namespaces.

    sudo python -m tests.rehearsal [--only CASE,…] [--keep-logs FOLDER]

A real deployment of the demo model (attention on hosts 0 and 1, ffn on 2 and 3) starts over a
bridge. In each case one thing goes wrong. The script says what it expects, what the processes said,
and what a user would see first; it ends with 1 where the two differ. Everything that it creates,
processes and namespaces, is gone at the end, after Ctrl-C, too.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HOSTS, NETWORK, HTTP_PORT = 4, "10.99.0", 8000
NAMES = [f"rehearsal{number}" for number in range(HOSTS)]
SWITCH = "rehearsal-switch"
START_SECONDS = 240.0
"""Time from the first process to `ready`, on a busy machine."""
SETTINGS = (
    *("attention.dp=4", "ffn.ep=4", "cluster.heartbeat_seconds=2", "cluster.ports=9110-9199"),
    *("lanes=1", "scheduler.slots=4", "scheduler.token_buckets=[16,64]"),
    *("scheduler.max_length=256", "scheduler.page_buckets=[16]", "cache.pages=64"),
    *(f"server.http_port={HTTP_PORT}", f"server.follower_http_port={HTTP_PORT}"),
)
REPOSITORY = Path(__file__).resolve().parent.parent
FIRST = re.compile(r"waiting for|WARNING|ERROR|CRITICAL|^jaxserve:|^ready")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(host: int, *words: str) -> list[str]:
    """The command that runs another one on a host, whose name it has."""
    named = f'hostname host{host} && exec "$@"'
    return ["ip", "netns", "exec", NAMES[host], "unshare", "--uts", "sh", "-c", named, "-", *words]


def on(host: int, *words: str) -> str:
    ran = subprocess.run(inside(host, *words), check=True, capture_output=True, text=True)
    return ran.stdout


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Four hosts and a bridge between them, each in a namespace."""
    try:
        for name in (SWITCH, *NAMES):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number, name in enumerate(NAMES):
            there = ("peer", "name", f"port{number}", "netns", SWITCH)
            ip("link", "add", "eth0", "netns", name, "type", "veth", *there)
            ip("-n", SWITCH, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            own = f"127.0.0.1 localhost\n{NETWORK}.{number + 1} host{number}\n"
            (folder / "hosts").write_text(own)  # gloo looks its own name up
        yield
    finally:
        for name in (SWITCH, *NAMES):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


class Cluster:
    """The processes of one case, with what they print."""

    def __init__(self, folder: Path, start_seconds: float):
        self._folder, self._settings = folder, [*SETTINGS, f"cluster.start_seconds={start_seconds}"]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *hosts: int) -> None:
        leader = f"{NETWORK}.1"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._folder.parent / "cache"),
            "JAXSERVE_CLUSTER_TOKEN": "of this rehearsal",
            "JAXSERVE_PROCESSES": f"{HOSTS}",
            "JAXSERVE_COORDINATOR": f"{leader}:9001",
            "JAXSERVE_CONTROL": f"{leader}:9002",
        }
        for host in hosts:
            words = [sys.executable, "-u", "-m", "jaxserve.serve", "--config", "demo"]
            words += [word for setting in self._settings for word in ("--set", setting)]
            with (self._folder / f"host{host}.log").open("wb") as log:
                self.processes[host] = subprocess.Popen(
                    inside(host, *words),
                    env=environment | {"JAXSERVE_PROCESS_ID": f"{host}"},
                    cwd=REPOSITORY,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def said(self, host: int) -> str:
        return (self._folder / f"host{host}.log").read_text(errors="replace")

    def expect(self, host: int, pattern: str, seconds: float) -> None:
        """Waits until a process has said something."""
        print(f"  expected of host {host} within {seconds:g} s: {pattern}", flush=True)
        end = time.monotonic() + seconds
        while True:
            over = time.monotonic() > end or self.processes[host].poll() is not None
            if found := re.search(pattern, self.said(host), re.MULTILINE):
                break
            if over:
                raise AssertionError(f"host {host} did not say {pattern!r}")
            time.sleep(0.2)
        print(f"  printed: {found[0]}", flush=True)

    def ended(self, seconds: float) -> dict[int, int]:
        """Waits until all have ended; returns their exit codes."""
        end = time.monotonic() + seconds
        for host, process in self.processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"host {host} has not ended after {seconds:g} s") from None
        return {host: process.returncode for host, process in self.processes.items()}

    def complete(self) -> float:
        """Has a completion made; returns its seconds."""
        body = json.dumps({"prompt": "The first day", "max_tokens": 8, "temperature": 0})
        began = time.monotonic()
        url = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
        answer = on(
            0, "curl", "-sS", "-m", "60", "-H", "content-type: application/json", "-d", body, url
        )
        assert json.loads(answer)["usage"]["completion_tokens"] == 8, answer
        return time.monotonic() - began

    def leave(self) -> None:
        """Ends all in order."""
        self.processes[0].send_signal(signal.SIGTERM)
        assert set(self.ended(60).values()) == {0}, "all end with 0 after SIGTERM"

    def show_first(self) -> None:
        """Prints what a user would see first, and the last line of each process."""
        for host in self.processes:
            lines = [line for line in self.said(host).splitlines() if FIRST.search(line)]
            for line in [*lines[:2], *lines[2:][-1:]]:
                print(f"    host {host}: {line[:240]}")

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def well(cluster: Cluster) -> None:
    cluster.start(*range(HOSTS))
    cluster.expect(0, r"^ready .*", START_SECONDS)
    for host in range(1, HOSTS):
        cluster.expect(host, r"process \d .*: ready.*", 30)
    print(f"  a completion took {cluster.complete():.2f} s")
    for host in range(1, HOSTS):
        assert "jaxserve:" in on(host, "curl", "-sS", f"http://127.0.0.1:{HTTP_PORT}/metrics")
    cluster.leave()


def late(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    cluster.expect(0, r"waiting for process 3 \(ffn\) to register, \d+ s", 60)
    time.sleep(30)
    cluster.start(3)
    cluster.expect(0, r"^ready .*", START_SECONDS)
    cluster.leave()


def missing(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    error = r"process 3 \(ffn\): did not register within 30 s of the last progress"
    for host in range(3):
        cluster.expect(host, rf"CRITICAL.*{error}", 90)
    assert set(cluster.ended(30).values()) == {1}


def cut_off(cluster: Cluster) -> None:
    cluster.start(*range(HOSTS))
    cluster.expect(0, r"^ready .*", START_SECONDS)
    ip("-n", SWITCH, "link", "set", "port2", "down")
    try:
        cluster.expect(0, r"process 2 \(ffn, host host2, pid \d+\): no heartbeat for \d+\.\d s", 20)
        cluster.expect(2, r"the leader .*: no heartbeat for \d+\.\d s", 20)
        assert set(cluster.ended(60).values()) == {1}
    finally:
        ip("-n", SWITCH, "link", "set", "port2", "up")


@contextlib.contextmanager
def firewall(host: int, ports: str, towards: int) -> Iterator[None]:
    """Drops what a host answers another one from these ports. (Rules of routing do that in every
    kernel; nftables may be absent.)"""
    rule = f"ipproto tcp sport {ports} to {NETWORK}.{towards + 1} blackhole".split()
    ip("-n", NAMES[host], "rule", "add", *rule)
    try:
        yield
    finally:
        ip("-n", NAMES[host], "rule", "del", *rule)


def firewalled(ports: str, port: str) -> Callable[[Cluster], None]:
    def case(cluster: Cluster) -> None:
        with firewall(0, ports, towards=1):
            cluster.start(*range(HOSTS))
            error = rf"registered but cannot reach {NETWORK}\.1:{port}"
            cluster.expect(1, rf"CRITICAL.*{error}.*", 120)
            cluster.expect(0, rf"CRITICAL.*process 1 \(attention, host host1, .*\): {error}.*", 20)
            assert set(cluster.ended(30).values()) == {1}

    return case


def slow(cluster: Cluster) -> None:
    on(
        1,
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        *["tbf", "rate", "8mbit", "burst", "64kb", "limit", "1mb"],
    )
    try:
        cluster.start(*range(HOSTS))
        cluster.expect(0, r"^ready .*", START_SECONDS)
        print(f"  a completion took {cluster.complete():.2f} s")
        cluster.leave()
    finally:
        on(1, "tc", "qdisc", "del", "dev", "eth0", "root")


CASES: dict[str, tuple[Callable[[Cluster], None], float]] = {
    "well": (well, 1800),
    "late": (late, 1800),
    "missing": (missing, 30),
    "cut-off": (cut_off, 1800),
    "firewalled-control": (firewalled("9001", "9001"), 30),
    "firewalled-plans": (firewalled("9110-9199", r"91\d\d"), 30),
    "slow": (slow, 1800),
}
"""Name → the case, and `cluster.start_seconds` in it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases (%(default)s)")
    parser.add_argument("--keep-logs", type=Path, help="folder for what the processes printed")
    options = parser.parse_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch, network():
        folder = options.keep_logs or Path(scratch)
        for name in options.only.split(","):
            case, start_seconds = CASES[name]
            (folder / name).mkdir(parents=True, exist_ok=True)
            cluster, began = Cluster(folder / name, start_seconds), time.monotonic()
            print(f"{name}:", flush=True)
            try:
                case(cluster)
                verdict = "as expected"
            except (AssertionError, subprocess.CalledProcessError) as error:
                verdict = f"NOT AS EXPECTED: {error}"
                failed.append(name)
            finally:
                cluster.kill()
            print("  what a user sees first, and last:")
            cluster.show_first()
            print(f"  {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())

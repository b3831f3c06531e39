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
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxserve.config.shipped import CONFIGS
from jaxserve.launch import __main__ as launch
from tests import golden
from tests.jaxserve.launch.rendered import write

HOSTS, NETWORK, URL = 4, "10.99.0", "http://127.0.0.1:8000"
NAMES = [f"rehearsal{number}" for number in range(HOSTS)]
SWITCH = "rehearsal-switch"
START_SECONDS = 240.0
"""Time from the first process to `ready`, on a busy machine."""
SETTINGS = """attention.dp=4 ffn.ep=4 cluster.heartbeat_seconds=2 cluster.ports=9110-9199 lanes=1
scheduler.slots=4 scheduler.token_buckets=[16,64] scheduler.max_length=256 cache.pages=64
scheduler.page_buckets=[16] server.http_port=8000 server.follower_http_port=8000"""
ADDRESSES = {"JAXSERVE_COORDINATOR": f"{NETWORK}.1:9001", "JAXSERVE_CONTROL": f"{NETWORK}.1:9002"}
SHARED = {"JAXSERVE_PROCESSES": f"{HOSTS}", "JAXSERVE_CLUSTER_TOKEN": "of this rehearsal"}
FIRST = re.compile(r"waiting for|WARNING|ERROR|CRITICAL|^jaxserve:|^ready")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(host: int, *words: str) -> list[str]:
    """The command that runs another one on a host, whose name it has."""
    named = f'hostname host{host} && exec "$@"'
    return ["ip", "netns", "exec", NAMES[host], "unshare", "--uts", "sh", "-c", named, "-", *words]


def on(host: int, *words: str) -> str:
    return subprocess.run(inside(host, *words), check=True, capture_output=True, text=True).stdout


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
            named = [f"{NETWORK}.{place + 1} host{place}\n" for place in range(HOSTS)]
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *named]))
        yield
    finally:
        for name in (SWITCH, *NAMES):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


class Cluster:
    """The processes of one case, with what they print."""

    def __init__(self, folder: Path, start_seconds: int):
        self._logs = [folder / f"host{host}.log" for host in range(HOSTS)]
        settings = [*SETTINGS.split(), f"cluster.start_seconds={start_seconds}"]
        self._settings = [word for setting in settings for word in ("--set", setting)]
        self.folder = folder
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"), "JAX_PLATFORMS": "cpu"}
        self._environment = {**os.environ, **ADDRESSES, **SHARED, **cache}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *hosts: int) -> None:
        words = [sys.executable, "-u", "-m", "jaxserve.serve", "--config", "demo", *self._settings]
        for host in hosts:
            own = self._environment | {"JAXSERVE_PROCESS_ID": f"{host}"}
            with self._logs[host].open("wb") as log:
                self.processes[host] = subprocess.Popen(
                    inside(host, *words), env=own, stdout=log, stderr=subprocess.STDOUT
                )

    def submit(self) -> None:
        """Runs the rendered batch script as Slurm does on four nodes with two devices each."""
        node = (CONFIGS / "hardware/h100.yaml").read_text().replace("host: 8", "host: 2")
        (self.folder / "pair.yaml").write_text(node.replace("link_devices: 8", "link_devices: 2"))
        here = ["--write", str(self.folder), "--hardware", str(self.folder / "pair.yaml")]
        options = ["--target", "slurm", "--without-keys", "--set", "server.host=0.0.0.0"]
        assert launch.main(["--config", "demo", *self._settings, *options, *here]) == 0
        tasks = {f"on-{n}": f'#!/bin/sh\nexec {shlex.join(inside(n))} "$@"\n' for n in range(HOSTS)}
        sinfo = "#!/bin/sh\nprintf 'host%s\\n' 0 1 2 3\n"
        write({"srun": golden.text("launch/srun.txt"), "sinfo": sinfo, **tasks}, self.folder)
        own = {"PATH": f"{self.folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
        own |= {"PYTHONPATH": str(CONFIGS.parent), "SLURM_JOB_ID": "4097"}
        own |= {f"SLURM_{name}_NODELIST": "host[0-3]" for name in ("JOB", "STEP")}
        own |= {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"}
        # The script makes its own secret and takes numbers and addresses from Slurm.
        shown = {k: v for k, v in self._environment.items() if not k.startswith("JAXSERVE_")}
        with self._logs[0].open("wb") as log:
            self.processes[0] = subprocess.Popen(
                ["bash", "jaxserve.sbatch"],
                cwd=self.folder,
                env=shown | own,
                stdout=log,
                stderr=log,
            )

    def cancel(self) -> None:
        """Ends a batch script as `scancel` does, which signals its steps, too."""
        script = self.processes[0].pid
        steps = Path(f"/proc/{script}/task/{script}/children").read_text().split()
        for process in (script, *map(int, steps)):
            os.kill(process, signal.SIGTERM)
        self.end(0)

    def ready(self) -> None:
        self.expect(0, r"^ready .*", START_SECONDS)

    def expect(self, host: int, pattern: str, seconds: float) -> None:
        """Waits until a process has said something."""
        print(f"  expected of host {host} within {seconds:g} s: {pattern}", flush=True)
        end, over = time.monotonic() + seconds, False
        while not (found := re.search(pattern, self._said(host), re.MULTILINE)):
            if over:
                raise AssertionError(f"host {host} did not say {pattern!r}")
            time.sleep(0.2)
            over = time.monotonic() > end or self.processes[host].poll() is not None
        print(f"  printed: {found[0]}", flush=True)

    def end(self, code: int, seconds: float = 60.0) -> None:
        """Waits until all have ended with this exit code."""
        end = time.monotonic() + seconds
        while None in (codes := [each.poll() for each in self.processes.values()]):
            assert time.monotonic() < end, f"after {seconds:g} s the exit codes are {codes}"
            time.sleep(0.2)
        assert {*codes} == {code}, f"exit codes {codes}, expected {code}"

    def complete(self) -> None:
        """Has a completion made."""
        body = json.dumps({"prompt": "The first day", "max_tokens": 8, "temperature": 0})
        began, header = time.monotonic(), "content-type: application/json"
        answer = on(0, "curl", "-sSm60", "-H", header, "-d", body, f"{URL}/v1/completions")
        assert json.loads(answer)["usage"]["completion_tokens"] == 8, answer
        print(f"  a completion took {time.monotonic() - began:.2f} s")

    def leave(self) -> None:
        """Ends all in order."""
        self.processes[0].send_signal(signal.SIGTERM)
        self.end(0)

    def close(self) -> None:
        """Kills what is left, and prints what a user sees first, and the last line."""
        print("  what a user sees first, and last:")
        for host, process in self.processes.items():
            process.kill()
            process.wait()
            lines = [line for line in self._said(host).splitlines() if FIRST.search(line)]
            for line in [*lines[:2], *lines[2:][-1:]]:
                print(f"    host {host}: {line[:240]}")

    def _said(self, host: int) -> str:
        return self._logs[host].read_text(errors="replace")


def well(cluster: Cluster) -> None:
    cluster.start(*range(HOSTS))
    cluster.ready()
    for host in range(1, HOSTS):
        cluster.expect(host, r"process \d .*: ready", 30)
        assert "jaxserve:process_ready" in on(host, "curl", "-sS", f"{URL}/metrics")
    cluster.complete()
    cluster.leave()


def late(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    cluster.expect(0, r"waiting for process 3 \(ffn\) to register, \d+ s", 60)
    time.sleep(30)
    cluster.start(3)
    cluster.ready()
    cluster.leave()


def missing(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    error = r"CRITICAL.*process 3 \(ffn\): did not register within 30 s of the last progress"
    for host in range(3):
        cluster.expect(host, error, 90)
    cluster.end(1)


def cut_off(cluster: Cluster) -> None:
    cluster.start(*range(HOSTS))
    cluster.ready()
    ip("-n", SWITCH, "link", "set", "port2", "down")
    try:
        cluster.expect(0, r"process 2 \(ffn, host host2, pid \d+\): silent for \d+\.\d s", 20)
        cluster.expect(2, r"the leader .*: silent for \d+\.\d s", 20)
        cluster.end(1)
    finally:
        ip("-n", SWITCH, "link", "set", "port2", "up")


def firewalled(ports: str, port: str) -> Callable[[Cluster], None]:
    """Drops host 0's answers to host 1 from these ports, by rules of routing."""

    def case(cluster: Cluster) -> None:
        rule = f"ipproto tcp sport {ports} to {NETWORK}.2 blackhole".split()
        ip("-n", NAMES[0], "rule", "add", *rule)
        try:
            cluster.start(*range(HOSTS))
            error = rf"registered but cannot reach {NETWORK}\.1:{port}.*"
            cluster.expect(1, rf"CRITICAL.*{error}", 120)
            cluster.expect(0, rf"CRITICAL.*process 1 \(attention, host host1, .*\): {error}", 20)
            cluster.end(1)
        finally:
            ip("-n", NAMES[0], "rule", "del", *rule)

    return case


def slurm(cluster: Cluster) -> None:
    cluster.submit()
    cluster.ready()
    cluster.complete()
    cluster.cancel()


def slow(cluster: Cluster) -> None:
    rate = ["tbf", "rate", "8mbit", "burst", "64kb", "limit", "1mb"]  # netem may be absent
    on(1, "tc", "qdisc", "add", "dev", "eth0", "root", *rate)
    try:
        cluster.start(*range(HOSTS))
        cluster.ready()
        cluster.complete()
        cluster.leave()
    finally:
        on(1, "tc", "qdisc", "del", "dev", "eth0", "root")


CASES: dict[str, tuple[Callable[[Cluster], None], int]] = {
    "well": (well, 1800),
    "late": (late, 1800),
    "missing": (missing, 30),
    "cut-off": (cut_off, 1800),
    "firewalled-control": (firewalled("9001", "9001"), 30),
    "firewalled-plans": (firewalled("9110-9199", r"91\d\d"), 30),
    "slow": (slow, 1800),
    "slurm": (slurm, 1800),
}
"""Name → the case, and `cluster.start_seconds` in it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="cases (%(default)s)")
    parser.add_argument("--keep-logs", type=Path, help="folder for what the processes printed")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch, network():
        for name in options.only.split(","):
            folder = (options.keep_logs or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            case, start_seconds = CASES[name]
            cluster, began, verdict = (
                Cluster(folder, start_seconds),
                time.monotonic(),
                "as expected",
            )
            print(f"{name}:", flush=True)
            try:
                case(cluster)
            except (AssertionError, subprocess.CalledProcessError) as error:
                verdict = f"NOT AS EXPECTED: {error}"
                failed.append(name)
            finally:
                cluster.close()
            print(f"  {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())

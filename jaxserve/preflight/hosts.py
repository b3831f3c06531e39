"""Checks of hosts that start no JAX backend: versions, devices as JAX finds them, ports, clocks."""

import contextlib
import importlib.metadata
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.commands import doctor
from jaxserve.config.deployment import Deployment
from jaxserve.link.session.channel import join_address, split_address
from jaxserve.ports import listening
from jaxserve.preflight.meeting import Meeting
from jaxserve.preflight.outcomes import Failed, Skipped

Found = tuple[str, dict[str, Any]]
PACKAGES = (
    *("jaxserve", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas", "nvidia-cudnn-cu13"),
)
SECONDS = 30.0
CLOCK_SECONDS = 0.05
"""Clocks may differ by as much: stages of several hosts stand in one timeline."""
DIAL_SECONDS = 5.0


def versions(meeting: Meeting) -> Found:
    """Versions of packages and of the driver, which must be equal in all processes.

    Raises:
      Failed: names each version that differs.
    """
    own: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            own[name] = importlib.metadata.version(name)
    if driver := _driver():
        own["driver"] = driver
    wrong = [
        f"{finding.name}: {finding.text}"
        for finding in doctor.versions()
        if finding.state == "wrong"
    ]
    all_of = meeting.gather(own, SECONDS)
    for name in sorted({name for one in all_of for name in one}):
        found = [one.get(name, "absent") for one in all_of]
        if len(set(found)) > 1:
            wrong.append(f"{name}: {', '.join(f'process {n} {v}' for n, v in enumerate(found))}")
    if wrong:
        raise Failed("\n".join(wrong), own)
    return ", ".join(f"{name} {version}" for name, version in own.items()), own


def _driver() -> str:
    """Version of NVIDIA's driver; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.splitlines()[0].strip() if told.stdout.strip() else ""


def devices(found: Mapping[str, Any]) -> Found:
    """The devices of this host and the links between them; `found` is `doctor.probe()`."""
    if "error" in found:
        raise Failed(str(found["error"]))
    wrong = [
        f"link {name}: {answer}"
        for name, answer in found["links"].items()
        if answer is not True and answer != "needs two devices"
    ]
    size = "" if found["memory"] is None else f" of {found['memory'] / 1e9:.1f} GB"
    text = f"{found['devices']} x {found['kind']}{size} ({found['platform']})"
    if wrong:
        raise Failed(f"{text}\n" + "\n".join(wrong), dict(found))
    return text, dict(found)


def clock(meeting: Meeting) -> Found:
    """Difference of this host's clock from that of process 0.

    Raises:
      Failed: it is too large.
    """
    if meeting.count == 1:
        raise Skipped("one process has one clock")
    found = meeting.clock(SECONDS)
    text = f"process 0 is {found.ahead * 1e3:+.2f} ms ahead (± {found.error * 1e3:.2f} ms)"
    if abs(found.ahead) > CLOCK_SECONDS + found.error:
        raise Failed(f"{text}, at most {CLOCK_SECONDS * 1e3:g} ms allowed: run an NTP client")
    return text, found._asdict()


def addresses_of(deployment: Deployment) -> list[str]:
    """Addresses of the deployment file where workers listen."""
    fleet = deployment.fleet
    static = fleet.prefill + fleet.domains if fleet.registry == "static" else []
    return [*static, *deployment.link.addresses]


def ports(meeting: Meeting, deployment: Deployment, named: Sequence[str]) -> Found:
    """Connects every process with a free port of every other, and tries the file's own addresses.

    Args:
      named: addresses of the control plane and of the coordination service.

    Raises:
      Failed: names each pair that does not connect.
    """
    wrong, tried = [], 0
    with listening("", 0) as server:
        here = join_address(meeting.local_host, server.getsockname()[1])
        addresses = meeting.gather(here, SECONDS)
        for number, address in enumerate(addresses):
            tried += 1
            if problem := _dial(address):
                ends = f"process {meeting.number} cannot reach process {number}"
                wrong.append(f"{ends} at {address}: {problem}")
        meeting.gather(None, SECONDS + DIAL_SECONDS * meeting.count)
    wanted = [(address, "the deployment file") for address in addresses_of(deployment)]
    if meeting.number == 0:
        wanted += [(address, "the command line") for address in named]
    for address, where in wanted:
        if _is_here(address):
            tried += 1
            if problem := _bind(address):
                wrong.append(f"{address} of {where} cannot be listened on: {problem}")
    if wrong:
        raise Failed("\n".join(wrong))
    return f"{tried} ports answer", {"addresses": addresses}


def _dial(address: str) -> str:
    try:
        with socket.create_connection(split_address(address), timeout=DIAL_SECONDS):
            return ""
    except OSError as error:
        return str(error)


def _bind(address: str) -> str:
    host, port = split_address(address)
    try:
        with socket.create_server((host, port)):
            return ""
    except OSError as error:
        return str(error)


def _is_here(address: str) -> bool:
    """Returns True if the host of an address is this one."""
    host, _ = split_address(address)
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False

"""`jaxserve doctor`: versions, devices, memory, links, and which deployments would run here.

Nothing is changed, and no weight is read. JAX is tried in a process of its own
(`doctor_probe.py`). Exits 0 if the demo could be served here, 1 if not.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

import jaxserve
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS, deployment_names
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.fleet.sizing import usable_cores
from jaxserve.storage.mirror import user_cache

GB = 10**9
PROBE_SECONDS = 120
"""A TPU's runtime takes up to a minute to start."""
FEW_FILES = 4096
"""With fewer open files a server of a thousand streams and their pages' links runs out."""


class Finding(NamedTuple):
    """One line of the report."""

    section: str
    name: str
    text: str
    state: str = "ok"
    """ok, note (works, with a limit) or wrong (something does not work because of it)."""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="jaxserve doctor", description="Say what this host has and what would run on it."
    )
    made.add_argument("--json", action="store_true", help="for programs")
    made.add_argument(
        "--config", metavar="FILE", help="judge this deployment instead of all that come with it"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    options = parser().parse_args(arguments)
    found = probe()
    findings = [*versions(), *_host(), *_devices(found)]
    names = [] if options.config else deployment_names()
    judged = {name: CONFIGS / f"{name}.yaml" for name in names} or {options.config: options.config}
    findings += [_deployment(name, path, found) for name, path in judged.items()]
    wanted = options.config or "demo"
    works = any(
        f.section == "deployments" and f.name == wanted and f.state == "ok" for f in findings
    )
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        _print(findings)
    return 0 if works else 1


def probe() -> dict[str, Any]:
    """The result of `doctor_probe.py`, or `{"error": why not}`."""
    command = [sys.executable, "-m", "jaxserve.commands.doctor_probe"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {
            "error": f"JAX did not answer within {PROBE_SECONDS} s; does another process hold the "
            "accelerator?"
        }
    try:
        return dict(json.loads(run.stdout))
    except ValueError:
        last = [line for line in run.stderr.splitlines() if line.strip()][-1:]
        return {"error": f"JAX does not start (exit {run.returncode}): {''.join(last)}"}


def versions() -> Iterator[Finding]:
    """Versions of packages, and packages that are not those that jaxserve asks for."""
    yield Finding(
        "versions", "jaxserve", f"{jaxserve.__version__} in {Path(jaxserve.__file__).parent}"
    )
    yield Finding("versions", "python", f"{platform.python_version()}, {platform.platform()}")
    try:
        requirements = importlib.metadata.requires("jaxserve") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "versions", "packages", "jaxserve is not installed by pip: not checked", "note"
        )
        return
    wrong = False
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        there = _version(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            wrong = True
            yield Finding(
                "versions",
                requirement.name,
                f"{there or 'missing'}, asked {requirement.specifier}",
                "wrong",
            )
    if not wrong:
        yield Finding("versions", "packages", "all there, in the versions asked for")
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin"):
        if there := _version(name):
            yield Finding("versions", name, there)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host() -> Iterator[Finding]:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield Finding("host", "memory", f"{pages * page / GB:.1f} GB, {usable_cores()} cores")
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= limit < FEW_FILES
    hint = f"; below {FEW_FILES}: raise it with ulimit -n" if few else ""
    yield Finding("host", "open files", f"{limit} (at most {hard}){hint}", "note" if few else "ok")
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or user_cache() / "jaxserve")
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    writable = os.access(parent, os.W_OK)
    free = shutil.disk_usage(parent).free / GB
    text = f"{cache}, {free:.0f} GB free" if writable else f"{cache} cannot be written"
    yield Finding("host", "compile cache", text, "ok" if writable else "note")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("host", "loopback", f"port {server.getsockname()[1]} could be bound")
    except OSError as error:
        yield Finding("host", "loopback", f"no port can be bound: {error}", "wrong")


def _devices(found: dict[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        yield Finding("devices", "jax", found["error"], "wrong")
        return
    memory = "memory unknown" if found["memory"] is None else f"{found['memory'] / GB:.1f} GB each"
    if found["platform"] == "cpu":
        text = "no accelerator: a deployment simulates as many devices as it needs"
    else:
        text = f"{found['devices']} x {found['kind']}, {memory}"
    yield Finding("devices", found["platform"], text)
    kernels = {
        "mosaic_tpu": "Pallas kernels for TPU",
        "mosaic_gpu": "Pallas kernels for Hopper",
        "triton_gpu": "a Pallas kernel for paged attention; plain XLA computes the rest, slower",
        "reference": "none for this device: plain XLA computes the same values"
        + ("" if found["platform"] == "cpu" else ", slower"),
    }[found["kernels"]]
    state = "note" if found["kernels"] == "reference" and found["platform"] != "cpu" else "ok"
    yield Finding("devices", "kernels", kernels, state)
    for name, answer in found["links"].items():
        text = "arrays arrive" if answer is True else str(answer)
        skipped = answer is True or answer == "needs two devices"
        yield Finding("links", name, text, "ok" if skipped else "wrong")


def _deployment(name: str, path: Path | str, found: dict[str, Any]) -> Finding:
    """Whether a deployment would run here: devices, then what `serve --check` says."""
    from jaxserve.checkpoint.int8_products import read_model
    from jaxserve.commands.checking import on_named_hardware
    from jaxserve.roles.capacity import check_capacity, memory_of
    from jaxserve.roles.pipelines import role_bytes

    def say(text: str, state: str = "ok") -> Finding:
        return Finding("deployments", name, text, state)

    try:
        deployment = load_deployment(path)
        config = on_named_hardware(read_model(deployment)[0], deployment)
        roles = role_bytes(config, deployment)
        check_capacity(config, deployment, memory_of(deployment), role_bytes)
    except (ConfigError, CheckpointError) as error:
        return say(str(error).splitlines()[0], "wrong")
    needed = sum(role.devices for role in roles)
    largest = max(role.total for role in roles)
    weight = f"{needed} device{'s' if needed > 1 else ''} of {largest / GB:.3g} GB"
    if "error" in found:
        return say(f"needs {weight}; JAX does not start", "wrong")
    there, memory = found["devices"], found["memory"]
    if found["platform"] == "cpu":
        total = sum(role.devices * role.total for role in roles)
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if total > 0.8 * host:
            return say(f"needs {weight}; this host has {host / GB:.0f} GB in all", "note")
        return say(f"would run on {needed} simulated CPU devices")
    if needed > there:
        return say(f"needs {weight}, this host has {there}: several hosts", "note")
    if memory is not None and largest > memory:
        return say(f"needs {weight}, a device here has {memory / GB:.0f} GB", "note")
    return say(f"would run: {weight}")


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(f"{section}")
        mark = {"ok": " ", "note": "~", "wrong": "!"}[finding.state]
        print(f" {mark} {finding.name.ljust(width)}  {finding.text}")
    print("! does not work, ~ works with a limit or elsewhere")


if __name__ == "__main__":
    sys.exit(main())

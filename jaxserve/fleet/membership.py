"""What each process of a deployment owns, and what it says of itself when it joins.

Pure arithmetic and digests for `devices.py` and the two ends of the control plane
(`identity`). Knows nothing of JAX, sockets or command lines.
"""

import hashlib
import importlib.metadata
import os
import socket
from collections.abc import Mapping

import msgspec

import jaxserve
from jaxserve.config.deployment import AttentionRole, Deployment, FFNRole, deployment_of
from jaxserve.errors import ConfigError
from jaxserve.fleet.control import Identity
from jaxserve.link.route import Route
from jaxserve.storage.mirror import local_folder


class ProcessShare(msgspec.Struct, frozen=True):
    """The part of the deployment's devices that one process owns."""

    attention: int
    ffn: int

    @property
    def devices(self) -> int:
        return self.attention + self.ffn

    @property
    def role(self) -> str:
        """`attention`, `ffn`, or both."""
        return " and ".join(name for name in ("attention", "ffn") if getattr(self, name))


def process_shares(deployment: Deployment, processes: int) -> tuple[ProcessShare, ...]:
    """How the deployment's devices divide over its processes, in process order.

    One process has all. Otherwise attention lives on the first a processes and ffn on the rest,
    where a divides both evenly; of several such a, the one with the most equal processes. Each has
    an equal part of both roles where that is asked for, or nothing else divides
    (`Deployment.shares_processes`).
    Every attention process has its part of every domain. A colocated deployment has its one mesh on
    all processes.

    Raises:
      ConfigError: nothing divides evenly; the message shows the arithmetic.
    """
    roles = deployment.attention, deployment.ffn
    attention, ffn = (role.devices for role in roles)
    domains = deployment.runtime_domains
    sizes = (
        f"attention dp {roles[0].dp} × tp {roles[0].tp} = {attention} devices"
        + (f" of each of {domains} domains" if domains > 1 else ""),
        f"ffn ep {roles[1].ep} × tp {roles[1].tp} = {ffn} devices",
    )
    if deployment.mode == "colocated":
        if attention % processes:
            raise ConfigError(f"{sizes[0]} do not divide evenly over {processes} processes")
        return (ProcessShare(attention // processes, 0),) * processes
    if processes == 1:
        return (ProcessShare(domains * attention, ffn),)
    if deployment.shares_processes(processes):
        return (ProcessShare(domains * attention // processes, ffn // processes),) * processes
    roles_processes = roles[0].processes, roles[1].processes
    if all(roles_processes):
        if sum(roles_processes) != processes:
            raise ConfigError(
                f"attention.processes {roles_processes[0]} + ffn.processes {roles_processes[1]} = "
                f"{sum(roles_processes)}, but --processes is {processes}"
            )
        a, f = roles_processes
        return _shares(domains * (attention // a), a, ffn // f, f)
    fitting = deployment.separate_splits(processes)
    if not fitting:
        splits = [(first, processes - first) for first in range(1, processes)]
        tried = ", ".join(f"{attention}/{a} and {ffn}/{f}" for a, f in splits)
        works = [
            str(count)
            for count in range(2, attention + ffn + 1)
            if deployment.separate_splits(count) or deployment.shares_processes(count)
        ]
        raise ConfigError(
            f"{sizes[0]} and {sizes[1]} do not divide evenly over {processes} processes, the "
            f"first for attention and the rest for ffn: {tried}; nor does each process get the "
            f"same part of both: {attention}/{processes} and {ffn}/{processes}. Numbers of "
            f"processes that work: 1, {', '.join(works)}"
        )
    a, f = min(fitting, key=lambda split: abs(domains * attention / split[0] - ffn / split[1]))
    return _shares(domains * (attention // a), a, ffn // f, f)


def _shares(attention: int, a: int, ffn: int, f: int) -> tuple[ProcessShare, ...]:
    """`a` processes with so many attention devices each, then `f` with so many ffn devices."""
    return (ProcessShare(attention, 0),) * a + (ProcessShare(0, ffn),) * f


def describe_roles(deployment: Deployment) -> str:
    """The roles and links of a deployment as a table: `serve --check`."""
    rows = [["role", "runtime", "devices", "processes", "hardware"]]
    rows += _role_rows(deployment, deployment.domains)
    prefill, pages = deployment.prefill, deployment.pages
    if prefill.workers:
        for row in _role_rows(deployment_of(deployment, "prefill"), 1):
            rows.append([f"prefill {row[0]} x {prefill.workers}", *row[1:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    a, f, link = deployment.attention, deployment.ffn, deployment.link
    if deployment.mode == "afd":
        route = Route(a.devices, f.devices, f.instances)
        where = f", ffn workers at {', '.join(link.addresses)}" if link.addresses else ""
        lines.append(
            f"link: {route.attention} pieces a message in {len(route.legs)} "
            f"{'copy' if len(route.legs) == 1 else 'copies'}, {link.transport}, rows in "
            f"{deployment.dispatch_format}, answers in {deployment.combine_format}{where}"
        )
    if prefill.workers:
        failed = "recomputed by the domain" if pages.on_failure == "recompute" else "failed"
        lines.append(
            f"pages: up to {pages.held} requests held by a prefill worker, leases of "
            f"{pages.lease_seconds:g} s, a hand-off that does not succeed is {failed}"
        )
    if prefill.long_workers:
        lines.append(
            f"long prompts: of {prefill.long_tokens} tokens and more, on "
            f"{prefill.long_workers} of {prefill.workers} prefill workers"
        )
    fleet = deployment.fleet
    if fleet.domains:
        places = {"prefill workers": fleet.prefill, "domains": fleet.domains}
        lines.append(
            f"router: {fleet.registry} registry; "
            + "; ".join(f"{what} at {', '.join(where)}" for what, where in places.items() if where)
        )
    return "\n".join(lines)


def _role_rows(deployment: Deployment, domains: int) -> list[list[str]]:
    """A row a role: name, runtime, devices, processes, hardware."""
    a, f, link = deployment.attention, deployment.ffn, deployment.link
    sizes: dict[str, tuple[AttentionRole | FFNRole, str]] = {
        "attention": (a, f"dp {a.dp} x tp {a.tp} = {a.devices}"),
        "ffn": (f, f"ep {f.ep} x tp {f.tp} = {f.devices}"),
    }
    if deployment.mode == "colocated":
        sizes = {"colocated": sizes["attention"]}
    rows = []
    for name, (role, devices) in sizes.items():
        apart = link.transport == "pull"
        processes = str(role.processes or (1 if apart else "as started"))
        times = f" x {domains}" if domains > 1 and name != "ffn" else ""
        rows.append([name + times, role.runtime, devices, processes, role.hardware or "-"])
    return rows


def role_share(deployment: Deployment, role: str) -> ProcessShare:
    """What the one process of a role owns that has a runtime for itself."""
    if role == "attention":
        return ProcessShare(deployment.attention.devices, 0)
    return ProcessShare(0, deployment.ffn.devices)


def identity(process_id: int, processes: int, deployment: Deployment) -> Identity:
    """What this process says of itself when it joins (see `control.refusal`)."""
    facts = deployment_facts(deployment)
    text = "\n".join(f"{key} = {value}" for key, value in facts.items())
    return Identity(
        process_id=process_id,
        processes=processes,
        role=process_shares(deployment, processes)[process_id].role,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions={
            "jaxserve": jaxserve.__version__,
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
        },
        digest=hashlib.blake2s(text.encode(), digest_size=8).hexdigest(),
        facts=facts,
    )


def deployment_facts(deployment: Deployment) -> dict[str, str]:
    """Everything that all processes must agree on, one dotted key a value.

    The model counts by what its config.json says, not by the path, which may differ from host to
    host; the addresses of the network faces concern the leader alone.
    """
    facts: dict[str, str] = {}

    def flatten(tree: Mapping[str, object], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{name}.")
            else:
                facts[f"{prefix}{name}"] = str(value)

    tree = msgspec.to_builtins(deployment)
    del tree["server"]
    tree["model"] = model_digest(deployment.model)
    flatten(tree, "")
    return facts


def model_digest(folder: str) -> str:
    """Of a model's config.json."""
    config = local_folder(folder) / "config.json"
    if not config.is_file():
        return "no config.json"
    return hashlib.blake2s(config.read_bytes(), digest_size=8).hexdigest()

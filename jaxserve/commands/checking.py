"""`serve --check`: roles and links of a deployment, its bytes, and how its open keys were chosen.

Reads only the headers of weight files, and touches no device unless an accelerator's memory decides
over a size.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.checkpoint.manifest import MANIFEST
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.tensors import INDEX
from jaxserve.commands.kernel_coverage import PLATFORMS, kernel_gaps
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.sections import AttentionRole, FFNRole
from jaxserve.config.shipped import device_kind, hardware_file
from jaxserve.config.topology import Role
from jaxserve.errors import CheckpointError, ConfigError, exit_code
from jaxserve.fleet.ffn_shard import shard_of
from jaxserve.fleet.hardware import expected_platform
from jaxserve.fleet.sizing import Sizing
from jaxserve.link.dispatch.contract import MOST_MESSAGES
from jaxserve.link.dispatch.route import Route
from jaxserve.model.ffn import traffic
from jaxserve.model.row_width import deployment_row_bytes
from jaxserve.planner.link_load import check_link, link_load
from jaxserve.roles.both_roles import one_program_bytes, refusal
from jaxserve.roles.capacity import (
    RoleBytes,
    Sizes,
    check_capacity,
    gb_text,
    memory_of,
    simulated_memory,
)
from jaxserve.roles.ffn_bytes import ffn_bytes, most_messages, pass_activations
from jaxserve.roles.pipelines import role_bytes
from jaxserve.roles.sizing import DEVICE_PART, HOST_PART, UsableDevices, count_parameters
from jaxserve.storage.mirror import local_folder, weight_files

BY_DEVICES = frozenset(("attention.dp", "attention.tp", "cache.pages"))
"""Keys whose values are those of the devices here."""


def named_machine(deployment: Deployment) -> UsableDevices | None:
    """A host of `attention.hardware`; None where JAX knows no such accelerator."""
    kind = device_kind(deployment.attention.hardware)
    if not kind.startswith(("TPU", "NVIDIA")):
        return None
    host = hardware_file(deployment.attention.hardware)
    memory = round(DEVICE_PART * host["memory_gb"] * 1e9)
    return UsableDevices(
        "tpu" if kind.startswith("TPU") else "gpu", host["devices_per_host"], memory
    )


def reported(sizing: Sizing, config: ModelConfig, deployment: Deployment) -> dict[Role, int | None]:
    """Bytes of a device of each role, where sizes were chosen for its devices."""
    machine = sizing.machine
    if not (BY_DEVICES & sizing.found.keys() and machine and machine.memory is not None):
        return {}
    if machine.platform != "cpu":
        size = round(machine.memory / DEVICE_PART)
        return {"attention": size, "ffn": size}
    config = msgspec.structs.replace(config, platform="cpu")
    devices = {role: getattr(deployment, role).devices for role in deployment.topology.roles}
    free = round(machine.memory / HOST_PART)
    return simulated_memory(config, deployment, devices, free, role_bytes)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def chosen(sizing: Sizing) -> str:
    """A line for each chosen value: key, value and reason."""
    found = sizing.found.items()
    rows = [[key, str(one.value).replace(" ", ""), one.reason] for key, one in found]
    return "\n".join(aligned(rows))


def check(deployment: Deployment, sizing: Sizing | None = None) -> int:
    """Prints a report on a deployment; returns the exit code: 1 if it does not fit, or does not run
    on the named hardware, 2 if the weight files are not the model's.

    Args:
      sizing: chose the values of keys that the user left out.
    """
    workers = {"": deployment}
    if deployment.prefill.workers:
        workers["a prefill worker:\n"] = deployment_of(deployment, "prefill")
    begin = time.monotonic()
    read = {title: read_model(worker) for title, worker in workers.items()}
    reading = time.monotonic() - begin
    models = {
        title: on_named_hardware(config, workers[title]) for title, (config, _) in read.items()
    }
    known = reported(sizing, models[""], deployment) if sizing else {}
    parts = [describe_roles(deployment)]
    steps_on = models[""].platform if deployment.whole_steps else ""
    one_process = steps_on == "tpu" or (sizing is not None and "pipeline" in sizing.found)
    sizes = one_program_bytes if one_process else _bytes_of_workers
    for title, worker in workers.items():
        memory = memory_of(worker, known)
        parts.append(title + describe(models[title], worker, memory, sizes))
    if load := link_load(models[""], deployment):
        parts.append(f"link with every slot in use: {load}")
    if sizing and sizing.found:
        parts.append("chosen, as not written:\n" + chosen(sizing))
    print(*parts, sep="\n\n")
    wrong = [_check_files(workers[title], names, reading) for title, (_, names) in read.items()]
    try:
        for title, worker in workers.items():
            check_capacity(models[title], worker, memory_of(worker, known), sizes)
        check_link(models[""], deployment)
    except ConfigError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return max(1, *wrong)
    return max(_check_kernels(models, workers), *wrong)


def _bytes_of_workers(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes, ...]:
    """Returns `role_bytes`; if several ffn workers share the ffn role, those of the first one,
    which also has the shared experts."""
    parts = role_bytes(config, deployment)
    if deployment.ffn.instances == 1 or not deployment.topology.crosses_runtimes:
        return parts
    (ffn,) = ffn_bytes(*shard_of(config, deployment, 0))
    return parts[0], ffn._replace(devices=deployment.ffn.devices)


def on_named_hardware(config: ModelConfig, deployment: Deployment) -> ModelConfig:
    """Returns the model as the hardware that the roles name runs it, or else as this host does."""
    named = deployment.ffn.hardware or deployment.attention.hardware
    platform = platform_of(device_kind(named) or named or expected_platform())
    return msgspec.structs.replace(config, platform=platform)


def describe_roles(deployment: Deployment) -> str:
    """Table of a deployment's roles and links."""
    rows = [["role", "runtime", "devices", "processes", "hardware"]]
    rows += _role_rows(deployment, deployment.domains)
    prefill, pages = deployment.prefill, deployment.pages
    if prefill.workers:
        for row in _role_rows(deployment_of(deployment, "prefill"), 1):
            rows.append([f"prefill {row[0]} x {prefill.workers}", *row[1:]])
    lines = aligned(rows)
    a, f, link = deployment.attention, deployment.ffn, deployment.link
    if deployment.topology.has("ffn"):
        route = Route(a.devices, f.devices, f.instances)
        if deployment.topology.crosses_runtimes:  # the same to each instance
            route = Route(a.devices, f.devices // f.instances)
        where = f", ffn workers at {', '.join(link.addresses)}" if link.addresses else ""
        lines.append(
            f"link: {route.attention} pieces a message in {len(route.legs)} "
            f"{'copy' if len(route.legs) == 1 else 'copies'}, {link.transport}, rows in "
            f"{deployment.dispatch_format}, answers in {deployment.combine_format}{where}"
        )
    if deployment.whole_steps:
        alone = "in one process (CPUs, TPUs) one program of both, whose bytes each device has"
        if reason := refusal(deployment):
            alone = f"not in one process, where {reason}"
        lines.append(f"a step: in a process for each role, a program of each; {alone}")
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
    if fleet.long_domains:
        lines.append(
            f"long sequences: of {fleet.long_tokens} tokens and more, on {fleet.long_domains} "
            "domains of their own"
        )
    if fleet.domains:
        places = {"prefill workers": fleet.prefill, "domains": fleet.domains}
        lines.append(
            f"router: {fleet.registry} registry; "
            + "; ".join(f"{what} at {', '.join(where)}" for what, where in places.items() if where)
        )
    return "\n".join(lines)


def describe_slice(deployment: Deployment) -> str:
    """Returns the hops of the roles' layout on a TPU slice, counted in a process of the planner."""
    kind = device_kind(deployment.attention.hardware)
    if not kind.startswith("TPU") or not deployment.topology.has("ffn"):
        return ""
    command = [sys.executable, "-m", "jaxserve.launch.slice_layout"]
    tree = msgspec.json.encode(deployment)
    return subprocess.check_output(command, input=tree, timeout=60.0).decode()


def _role_rows(deployment: Deployment, domains: int) -> list[list[str]]:
    """Rows of the table: name, runtime, devices, processes and hardware of each role."""
    a, f = deployment.attention, deployment.ffn
    sizes: dict[str, tuple[AttentionRole | FFNRole, str]] = {
        "attention": (a, f"dp {a.dp} x tp {a.tp} = {a.devices}"),
        "ffn": (f, f"ep {f.ep} x tp {f.tp} = {f.devices}"),
    }
    if deployment.topology.has("colocated"):
        sizes = {"colocated": sizes["attention"]}
    rows = []
    for name, (role, devices) in sizes.items():
        apart = deployment.topology.crosses_runtimes
        processes = str(role.processes or (1 if apart else "as started"))
        times = f" x {domains}" if domains > 1 and name != "ffn" else ""
        rows.append([name + times, role.runtime, devices, processes, role.hardware or "-"])
    return rows


def _check_files(deployment: Deployment, names: CheckpointNames, reading: float) -> int:
    """Compares the tensors that the weight files say to have with those of the model, also where
    the folder is in a bucket; returns the exit code. `reading` has the seconds of reading headers
    before."""
    begin, folder = time.monotonic() - reading, deployment.model
    try:
        here = local_folder(folder)
        there = any((here / name).exists() for name in (MANIFEST, INDEX))
        if not there and not weight_files(here):
            print(f"\nweight files: none in {folder}; it was read as an architecture alone")
            return 0
        size = open_checkpoint(folder, names).size
    except CheckpointError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return exit_code(error)
    seconds = time.monotonic() - begin
    print(
        f"\nweight files: all tensors there, {size / 1e9:.2f} GB, headers read in {seconds:.1f} s"
    )
    return 0


def _check_kernels(models: dict[str, ModelConfig], workers: dict[str, Deployment]) -> int:
    """Prints operations without a kernel on the named hardware, or, if none is named, on every
    platform with kernels; returns the exit code."""
    code = 0
    for title, worker in workers.items():
        default = worker.attention.hardware
        roles = worker.topology.roles
        hardware = {role: getattr(worker, role).hardware or default for role in roles}
        if not any(hardware.values()):
            lines, refused = _on_every_platform(models[title], worker)
        else:
            lines, refused = _on_hardware(models[title], worker, hardware)
        print(f"\n{title}" + "\n  ".join(lines))
        for text in refused:
            print(f"jaxserve: {text}", file=sys.stderr)
        code = code or int(bool(refused))
    return code


def _on_hardware(
    config: ModelConfig, deployment: Deployment, hardware: dict[Role, str]
) -> tuple[list[str], list[str]]:
    """Returns lines about the hardware of roles, and the problems for which it is refused."""
    kinds = {role: device_kind(name) for role, name in hardware.items()}
    known: dict[Role, str] = {role: kind for role, kind in kinds.items() if kind}
    slow, impossible = kernel_gaps(config, deployment, known)
    names = ", ".join(
        f"{role} on {kind or hardware[role] or 'hardware that is not named'}"
        for role, kind in kinds.items()
    )
    unknown = [f"{role}: nothing is known of it" for role in kinds if role not in known]
    complete = not (slow or impossible or unknown)
    lines = [f"kernels ({names}): {'all there' if complete else ''}", *slow, *unknown]
    return lines, impossible + (slow if deployment.strict_kernels else [])


def _on_every_platform(config: ModelConfig, deployment: Deployment) -> tuple[list[str], list[str]]:
    """A line for each platform; `strict_kernels` refuses where no platform has all kernels."""
    lacking = {}
    for kind in PLATFORMS:
        kinds = dict.fromkeys(deployment.topology.roles, kind)
        slow, impossible = kernel_gaps(config, deployment, kinds, steps=1)
        parts = [f"does not run: {text}" for text in impossible[:1]]
        if ops := list(dict.fromkeys(text.split(": ")[1] for text in slow)):
            parts.append(f"plain XLA, or a slow kernel, for {', '.join(ops)}")
        if parts:
            lacking[kind] = "; ".join(parts)
    begin = "kernels (no hardware is named"
    if not lacking:
        return [f"{begin}): all there on {', '.join(PLATFORMS)}"], []
    lines = [f"{begin}; attention.hardware, one of configs/hardware, gives the reasons):"]
    lines += [f"{kind}: {lacking.get(kind, 'all there')}" for kind in PLATFORMS]
    refuses = deployment.strict_kernels and len(lacking) == len(PLATFORMS)
    none = f"strict_kernels: none of {', '.join(PLATFORMS)} has all kernels that this needs"
    return lines, [none] if refuses else []


def describe(
    config: ModelConfig,
    deployment: Deployment,
    memory: Mapping[Role, int | None],
    sizes: Sizes = role_bytes,
) -> str:
    """Returns a readable table of the model's parameters and the bytes on every role's devices,
    which `sizes` computes.

    Raises:
      ConfigError: the model cannot be divided over the deployment's meshes.
    """
    count = count_parameters(config)
    lines = [
        f"parameters   {_billions(count.total)}, of which a token meets "
        f"{_billions(count.activated)}"
    ]
    if count.prediction:
        lines.append(f"             and {_billions(count.prediction)} of multi-token prediction")
    sequences = deployment.scheduler.slots * deployment.lanes
    tokens = deployment.cache.pages * deployment.cache.page_size
    lines.append(
        f"KV cache     {tokens:,} tokens a DP group, of up to {sequences} sequences at a time; "
        f"{deployment.attention.dp * tokens:,} in all"
    )
    if deployment.cache.host_gb:
        lines.append(f"host memory  {deployment.cache.host_gb:g} GB for KV pages (cache.host_gb)")
    for place, said in enumerate(describe_exchange(config, deployment)):
        lines.append(f"{'' if place else 'exchange':11}  {said}")
    parts = sizes(config, deployment)
    lines += _table(parts, memory)
    if deployment.topology.crosses_runtimes:
        lines.append(describe_passes(config, deployment, memory["ffn"]))
    lines += [
        f"{part.role}.memory_gb is not set: whether it fits is not known here"
        for part in parts
        if memory[part.role] is None
    ]
    return "\n".join(lines)


def describe_passes(config: ModelConfig, deployment: Deployment, available: int | None) -> str:
    """Returns a line about the messages that passes of an ffn worker over `pull` have side by side,
    and their memory.

    Args:
      available: bytes of an ffn device; None: unknown.
    """
    batching, domains = deployment.link.batching, deployment.domains
    if batching == "rotation":
        return "ffn passes   of one message (link.batching: rotation)"
    most = most_messages(config, deployment, available)
    used = min(most, 1 << (domains - 1).bit_length())
    bound = f"{most} is the most" if most == MOST_MESSAGES else f"memory allows {most}"
    return (
        f"ffn passes   of up to {used} messages side by side, domains = {domains} (link.batching: "
        f"{batching}): {gb_text(pass_activations(config, deployment, used))} GB of activations a "
        f"device; {bound}"
    )


def _table(parts: Sequence[RoleBytes], memory: Mapping[Role, int | None]) -> list[str]:
    fields = {"weights": "weights", "KV pages": "cache", "rings": "rings"}
    fields |= {"activations": "activations", "moving": "moving", "sum": "total"}
    if not any(part.rings for part in parts):
        del fields["rings"]
    rows = [["GB a device", "devices", *fields, "of"]]
    for part in parts:
        numbers = [gb_text(getattr(part, field)) for field in fields.values()]
        available = memory[part.role]
        known = "?" if available is None else gb_text(available)
        rows.append([part.role, str(part.devices), *numbers, known])
    name, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(name), *map(str.rjust, row[1:], others)]) for row in rows]


def _billions(count: int) -> str:
    short = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
    return f"{short} ({count:,})"


def describe_exchange(config: ModelConfig, deployment: Deployment) -> list[str]:
    """Returns lines about the exchange and its bytes; empty if nothing is exchanged."""
    mesh = traffic.exchange_mesh(deployment)
    if not config.experts or mesh.ranks == 1:
        return []
    row = deployment_row_bytes(config, deployment)
    met = traffic.ranks_met(mesh, config.experts, config.top_k)
    kind = traffic.exchange_of(config, deployment)
    moved: dict[traffic.ExchangeKind, traffic.Moved] = {
        "gather": traffic.gather_moves(mesh, row),
        "alltoall": traffic.alltoall_moves(mesh, row, met / mesh.ranks, config.moe.d_ff > 0),
    }
    (other,) = moved.keys() - {kind}
    numbers = {
        name: f"{way.there / 1e3:.1f} KB there, {way.back / 1e3:.1f} KB back"
        for name, way in moved.items()
    }
    lines = [
        f"{kind}: {numbers[kind]}; {other}: {numbers[other]}",
        "what a device receives a layer, for each of its own rows, which have experts on "
        f"{met:.2f} of {mesh.ranks} ranks",
    ]
    if mesh.shared:
        parts = config.moe.d_ff / config.moe.expert_d_ff / mesh.shared
        lines.append(
            f"{mesh.ranks} ranks = {mesh.routed} with routed experts, which multiply "
            f"{config.top_k / mesh.routed:.3f} rows a token on average, + {mesh.shared} with the "
            f"shared expert: {parts:.3f}"
        )
    hardware = (deployment.ffn if deployment.topology.has("ffn") else deployment.attention).hardware
    if kind == "alltoall" and not device_kind(hardware).startswith("TPU"):
        lines.append(
            "alltoall between GPUs needs NCCL 2.29, and GIN between hosts; tested at start"
        )
    return lines

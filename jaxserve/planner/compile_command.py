"""`plan compile`: programs of a deployment, compiled for a topology that is not here."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS, scaled
from jaxserve.config.model import platform_of
from jaxserve.errors import ConfigError
from jaxserve.planner import aot
from jaxserve.planner.aot import CompiledProgram, RoleMemory
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.models import model_config, model_folder
from jaxserve.planner.options import read_deployment
from jaxserve.planner.view import reported, show

GB = 1e9


def run(options: argparse.Namespace) -> int:
    """Compiles and shows; 1 if something would fail on the pod."""
    if options.topology is None:
        raise ConfigError("--topology is missing, as v6e:8x8")
    deployment = read_deployment(options)
    config = model_config(model_folder(deployment.model, options.configs), served=True)
    config = aot.with_int8_products(config, deployment)
    there = aot.topology(options.topology)
    kind = str(there[0].device_kind)
    config = msgspec.structs.replace(config, platform=platform_of(kind))
    hardware = load_hardware(kind, folder=options.configs)
    start = time.perf_counter()
    programs = aot.compile_deployment(
        config,
        deployment,
        there,
        options.bucket,
        workers=options.workers,
        report=lambda one: print(
            f"{one.text}: {one.error[:120] or 'compiled'}, {one.seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        ),
    )
    seconds = time.perf_counter() - start
    held = aot.memory(config, deployment, programs)
    problems = failures(deployment, programs, held, hardware)
    report = reported(
        "compile",
        f"{options.config.name} for {options.topology}, compiled",
        topology=options.topology,
        problems=problems,
        programs=programs,
        held=held,
        memory=aot.available(deployment, hardware),
        hosts=host_lines(programs, aot.hosts(deployment, there)),
        seconds=seconds,
        workers=options.workers,
        notes=[*remarks(deployment, hardware, kind), *copied(programs)],
    )
    show(options, report)
    for problem in problems:
        print(f"FAILS: {problem}", file=sys.stderr)
    return 1 if problems else 0


def host_lines(
    programs: Sequence[CompiledProgram], hosts: Mapping[int, tuple[str, ...]]
) -> list[str]:
    """Lists what each host compiles without a compile cache, hosts alike in one line."""
    lines = []
    for roles in dict.fromkeys(hosts.values()):
        own = [one for one in programs if one.role in roles]
        alike = [host for host, its in hosts.items() if its == roles]
        which = f"host {alike[0]}" if len(alike) == 1 else f"hosts {alike[0]} to {alike[-1]}"
        if len(alike) != alike[-1] - alike[0] + 1:
            which = f"hosts {', '.join(map(str, alike))}"
        lines.append(
            f"{which}: {' and '.join(roles)}: {len(own)} programs, "
            f"{sum(one.seconds for one in own):.0f} s"
        )
    return lines


def failures(
    deployment: Deployment,
    programs: Sequence[CompiledProgram],
    held: Sequence[RoleMemory],
    hardware: Hardware,
) -> list[str]:
    """Lists what would go wrong on the pod."""
    found = [f"{one.text}: {one.error}" for one in programs if one.error]
    orders: dict[tuple[int, bool], set[str]] = {}
    for one in programs:
        if not one.error:
            orders.setdefault((one.bucket.tokens, "pass" in one.name), set()).add(one.exchanges)
    for (tokens, _), own in orders.items():
        if len(own) > 1:
            found.append(f"{tokens} tokens: the roles exchange messages in different orders")
    memory = aot.available(deployment, hardware)
    for part in held:
        there = memory[part.role] or 0
        if part.total > there:
            found.append(
                f"{part.role}: {part.total / GB:.2f} GB on each of {part.devices} devices, which "
                f"have {there / GB:.2f} GB"
            )
    return found


def remarks(deployment: Deployment, hardware: Hardware, device_kind: str) -> list[str]:
    """Lists what will not fail, and should be known."""
    found = []
    for role in ("attention", "ffn"):
        key, name = f"{role}.weights", getattr(deployment, role).weights
        if scaled(name) and FORMATS[name].bits == 8 and name not in hardware.teraflops:
            found.append(f"{key} = {name}: {device_kind} has no such products, they run in BF16")
    if (transport := deployment.topology.transport) and transport.collective:
        found.append(
            f"link.transport = {deployment.link.transport}: its collective is not compiled here"
        )
    roles = deployment.topology.roles
    unset = [role for role in roles if not getattr(deployment, role).memory_gb]
    if unset:
        size = hardware.memory / GB
        found.append(f"{', '.join(unset)}.memory_gb is not set: {size:.1f} GB, the whole device")
    return found


def copied(programs: Sequence[CompiledProgram]) -> list[str]:
    """Lists what programs copy before they compute, which takes time in every step, and memory."""
    return [
        f"{one.text} writes {one.copied / GB:.2f} GB of weights or pages again "
        "before it uses them, in every step or layer"
        for one in programs
        if one.copied
    ]

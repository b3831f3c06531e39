"""The processes that a deployment has on this host: their roles, arguments and addresses.

All listen on free ports of loopback, whatever addresses the deployment has. Starts nothing; called
by the launcher's command.
"""

import argparse
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.ports import free_ports


class Member(NamedTuple):
    """A process that the supervisor runs.

    Attributes:
      name: name for human readers; empty: its number says it all.
      arguments: its own arguments, after the common command.
      environment: its own variables.
      runtime: number of its runtime; processes of one runtime share it.
      listens: address on which it listens, if that differs from the dialled address.
      dialled: address that other processes dial.
      pages: both addresses of a prefill worker's pages server.
      role: role of a worker.
      spared_by: role of the workers that do its work while it is gone; empty: requests wait for it.
    """

    name: str
    arguments: list[str]
    runtime: int
    listens: str = ""
    dialled: str = ""
    pages: tuple[str, ...] = ()
    role: str = ""
    spared_by: str = ""
    environment: Mapping[str, str] = {}


def runtime_of(count: int, process: Member) -> list[Member]:
    """Returns the `count` processes of a runtime, which find each other on loopback."""
    if count == 1:
        return [process]
    coordinator, control = (f"127.0.0.1:{port}" for port in free_ports(2))
    shared = {
        "JAXSERVE_PROCESSES": f"{count}",
        "JAXSERVE_COORDINATOR": coordinator,
        "JAXSERVE_CONTROL": control,
    }
    return [
        process._replace(
            name=f"{process.name}, process {one}" if process.name else "",
            environment={**shared, "JAXSERVE_PROCESS_ID": f"{one}"},
        )
        for one in range(count)
    ]


ROLES_APART = ("attention.runtime=attention", "ffn.runtime=ffn", "link.transport=pull")
"""Settings of a deployment whose roles get runtimes of their own."""


def _places(deployment: Deployment, written: Collection[str]) -> Mapping[str, Any]:
    """Chooses addresses with which such a deployment is read, one for each process of an ffn worker
    of each instance. Those that the launcher takes are free ones."""
    count = max(1, deployment.ffn.processes) * deployment.ffn.instances
    return {"link.addresses": [f"127.0.0.1:{port}" for port in range(1, count + 1)]}


def rehearsal(deployment: Deployment) -> list[str]:
    """Returns the arguments with which CPUs of this host stand in for the hardware of a deployment:
    memory is that of the host, and caches have pages for two of the longest sequences."""
    settings = ["attention.memory_gb=0", "ffn.memory_gb=0"]
    parts = {"": deployment}
    if deployment.prefill.workers:
        parts["prefill."] = deployment_of(deployment, "prefill")
        settings.append("prefill.attention.memory_gb=0")
    for part, worker in parts.items():
        longest = -(-worker.scheduler.max_length // worker.cache.page_size)
        settings.append(f"{part}cache.pages={min(worker.cache.pages, 2 * longest)}")
    return _set(*settings)


def roles_apart(deployment: Deployment, standbys: int) -> list[Member]:
    """Returns attention, which serves, and ffn as runtimes of their own (`link.transport: pull`)
    with the deployment's processes each. The ffn workers behind the first one of each instance wait
    to take over."""
    attention, ffn = (max(1, role.processes) for role in (deployment.attention, deployment.ffn))
    workers = deployment.ffn.instances * (1 + standbys)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(ffn * workers)]
    shared = _set(*ROLES_APART, f"link.addresses={addresses}")
    first = Member("role attention, runtime attention", [*shared, "--role", "attention"], 0)
    members = runtime_of(attention, first)
    for runtime, own in enumerate(itertools.batched(addresses, ffn), 1):
        worker = Member("role ffn, runtime ffn", [*shared, "--role", "ffn"], runtime, role="ffn")
        members += listening_at(own, runtime_of(ffn, worker))
    return members


def listening_at(addresses: Sequence[str], processes: Sequence[Member]) -> list[Member]:
    """Adds the argument by which each process of an ffn worker listens at its address."""
    return [
        process._replace(arguments=[*process.arguments, "--listen", address])
        for address, process in zip(addresses, processes, strict=True)
    ]


def fleet_of(
    deployment: Deployment, processes: int = 1, apart: bool = False, standbys: int = 0
) -> list[Member]:
    """The processes of a deployment on free addresses, the router first. Each prefill worker and
    each domain has `processes` processes. With `link.transport: pull` domains and ffn workers have
    those of the deployment.

    Args:
      apart: let every worker, and the pages server of every prefill worker, listen on another
        address than the dialled one; something else has to connect the two.
      standbys: further ffn workers of each instance, which take over when the active one ends.

    Raises:
      ConfigError: this launcher cannot start the deployment.
    """
    prefill, pull = deployment.prefill, deployment.topology.crosses_runtimes
    domains = deployment.domains if deployment.topology.separates_domains else 1
    if standbys and not pull:
        raise ConfigError(
            f"--standbys {standbys}: only ffn workers have them (link.transport: pull)"
        )
    of_domain, of_ffn = (max(1, role.processes) for role in (deployment.attention, deployment.ffn))
    shards = deployment.ffn.instances
    workers = prefill.workers + domains + pull * shards * (1 + standbys) * of_ffn
    every = [f"127.0.0.1:{port}" for port in free_ports(2 * workers if apart else workers)]
    addresses, listening = every[:workers], every[-workers:]
    prefills, rest = addresses[: prefill.workers], addresses[prefill.workers :]
    links = [f"127.0.0.1:{port}" for port in free_ports(2 * prefill.workers if apart else 0)]
    settings = [f"fleet.prefill={prefills}", f"fleet.domains={rest[:domains]}"]
    settings += ["fleet.registry=static"]
    if pull:
        if prefill.workers and deployment_of(deployment, "prefill").topology.crosses_runtimes:
            raise ConfigError(
                "prefill.mode: over link.transport = pull prefill workers would need ffn workers "
                "of their own; this launcher starts colocated ones"
            )
        if processes > 1 and not prefill.workers:
            raise ConfigError(
                f"--processes {processes}: over link.transport = pull a domain has those of "
                "attention.processes, and there are no prefill workers"
            )
        settings.append(f"link.addresses={rest[domains:]}")
    shared = _set(*settings)
    role = "attention" if pull else "decode"
    names = [(f"prefill worker {n}", "prefill", n) for n in range(prefill.workers)]
    names += [(f"domain {n}, role {role}", role, n) for n in range(domains)]
    members = [Member("router", [*shared, "--role", "router"], 0)]
    for runtime, (name, role, number) in enumerate(names, 1):
        arguments = [*shared, "--role", role, "--worker", f"{number}"]
        # Without prefill workers domains compute prompts, and without a domain the others.
        kind = "prefill" if role == "prefill" else "domain"
        worker = Member(name, arguments, runtime, role=kind, spared_by="domain")
        if links and role == "prefill":
            listens, dialled = links[2 * number : 2 * number + 2]
            arguments += ["--set", f"pages.listen={listens}", "--set", f"pages.address={dialled}"]
            worker = worker._replace(pages=(listens, dialled))
        own, dialled = listening[runtime - 1], addresses[runtime - 1]
        if own != dialled:
            arguments += ["--listen", own]
            worker = worker._replace(listens=own, dialled=dialled)
        members += runtime_of(of_domain if role == "attention" else processes, worker)
    places = zip(listening[len(names) :], rest[domains:], strict=True)
    for number, pairs in enumerate(itertools.batched(places, of_ffn)):
        name = "ffn worker" if number < shards else "standby"
        # Shards take turns; the address at which one listens need not be in `link.addresses`.
        arguments = [*shared, "--role", "ffn", "--worker", f"{number}"]
        worker = Member(f"{name}, role ffn", arguments, len(names) + 1 + number, role="ffn")
        made = listening_at([listens for listens, _ in pairs], runtime_of(of_ffn, worker))
        for process, (listens, dialled) in zip(made, pairs, strict=True):
            at = process._replace(listens=listens, dialled=dialled)
            members.append(at if apart else process)
    return members


def with_peers(workers: Sequence[Member]) -> list[Member]:
    """Adds arguments so that each worker serves its weights, and loads from the others on start."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(workers))]
    given = []
    for worker, address in zip(workers, addresses, strict=True):
        own = _set(f"weights.address={address}", f"weights.peers={addresses}")
        given.append(worker._replace(arguments=[*worker.arguments, *own]))
    return given


def _set(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def deployment_for(forwarded: Sequence[str], apart: bool = False) -> Deployment:
    """Reads the deployment from the arguments that every process gets.

    Args:
      apart: the launcher gives the roles runtimes and addresses, so the deployment's own are not
        looked at.

    Raises:
      ConfigError: it is wrong, or not named.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_deployment_arguments(parser)
    known, _ = parser.parse_known_args(forwarded)
    if known.config is None and known.model is None:
        raise ConfigError("--fleet or --runtimes: say --config or --model")
    elsewhere = ["fleet.prefill=[]", "fleet.domains=[]"]  # the file's addresses are not used here
    elsewhere += ROLES_APART if apart else ()
    given = known.config, known.model, [*known.set, *elsewhere]
    return read_deployment(*given, _places if apart else None)

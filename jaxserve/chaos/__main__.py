"""`python -m jaxserve.chaos --config FILE --minutes M --seed S`: faults under load with known
answers. With `--requests N` it causes no fault: it asks N requests and compares their answers.

Starts a fleet with `launch/local.py`, whose supervisor starts dead processes again. Exit code 0: no
wrong token, no hang, no lost request, every fault noticed and recovered from in time; 1: something
missed its limit; 2: a wrong option.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path

from jaxserve.bench.report import Report, conclude, describe_machine, table, this_machine
from jaxserve.bench.workers import LAUNCHER
from jaxserve.chaos.deployment import Deployment
from jaxserve.chaos.figures import Found, parts
from jaxserve.chaos.questions import answers, questions
from jaxserve.chaos.schedule import KINDS
from jaxserve.chaos.storm import START_SECONDS, Plan, Storm
from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.ports import free_port

ROLES = ("router", "prefill", "domain", "attention", "ffn", "follower", "face", "pages")
POSITIVE = ("minutes", "kills", "clients", "questions", "processes", "calm", "requests", "together")
"""Options whose numbers must be more than 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a storm and prints its figures. Returns the exit code."""
    made = parser()
    options = made.parse_args(arguments)
    kinds = options.faults.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        made.error(f"--faults: {', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    only = [role for role in options.only.split(",") if role]
    if unknown := sorted(set(only) - set(ROLES)):
        made.error(f"--only: {', '.join(unknown)}: expected some of {', '.join(ROLES)}")
    faces = options.faces.split(",")
    if unknown := sorted(set(faces) - {"http", "grpc"}):
        made.error(f"--faces: {', '.join(unknown)}: expected http, grpc or both")
    if not 0 <= options.cancelled <= 1:
        made.error(f"--cancelled {options.cancelled:g}: expected 0 to 1")
    if options.systems < 0 or options.resets < 0:
        made.error("--systems, --resets: expected 0 or more")
    if options.resets and not options.requests:
        made.error("--resets: only with --requests")
    for name in POSITIVE:
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            made.error(f"--{name} {getattr(options, name):g}: expected more than 0")
    if options.config is None and options.model is None:
        made.error("--config or --model: expected one of them")
    machine = this_machine()
    print(describe_machine(machine), flush=True)
    try:
        found = _storm(options, kinds, only)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except JaxserveError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    measured = parts(found)
    for part in measured:
        print(f"\n{table(part)}", flush=True)
    return conclude(Report("chaos", False, machine, measured), options.json)


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the options."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.chaos",
        description="Faults on purpose in a fleet on this host, under load with known answers.",
    )
    add_deployment_arguments(made)
    made.add_argument("--minutes", type=float, help="how long faults begin (1, or no end)")
    made.add_argument("--kills", type=int, metavar="N", help="faults at most (any number)")
    made.add_argument("--seed", type=int, default=0, help="of faults and load (%(default)s)")
    made.add_argument("--faults", default="kill", metavar="KIND,…", help=f"of {', '.join(KINDS)}")
    made.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="processes that each fault befalls at the same moment (%(default)s)",
    )
    made.add_argument(
        "--only", default="", metavar="ROLE,…", help=f"whose processes, of {', '.join(ROLES)} (all)"
    )
    made.add_argument("--clients", type=int, default=8, help="at the same time (%(default)s)")
    made.add_argument(
        "--calm", type=float, default=8.0, help="seconds before the first fault (%(default)g)"
    )
    made.add_argument("--questions", type=int, default=12, help="different ones (%(default)s)")
    made.add_argument(
        "--systems",
        type=int,
        default=0,
        metavar="N",
        help="system prompts that the questions begin with (%(default)s: none)",
    )
    made.add_argument(
        "--requests", type=int, metavar="N", help="ask this many requests, and break nothing"
    )
    made.add_argument(
        "--resets",
        type=int,
        default=0,
        metavar="N",
        help="resets of the prefix caches during --requests (%(default)s)",
    )
    made.add_argument(
        "--cancelled",
        type=float,
        default=0.1,
        metavar="PART",
        help="part of the requests that is cancelled (%(default)g)",
    )
    made.add_argument("--faces", default="http,grpc", help="of the clients in turn (%(default)s)")
    made.add_argument("--vocab", type=int, default=0, help="prompts are token ids below this")
    made.add_argument("--processes", type=int, default=1, help="of each worker (%(default)s)")
    made.add_argument("--standbys", type=int, default=0, help="of the ffn worker (%(default)s)")
    made.add_argument(
        "--restart-seconds",
        type=float,
        default=0.5,
        help="until what died is started again (%(default)g)",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="for the report")
    made.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs stay")
    return made


def check_victims(only: Sequence[str], there: Mapping[str, Sized], together: int) -> None:
    """Raises ConfigError if `only` names a role that no process has, or if its roles have fewer
    than `together` processes."""
    if absent := [role for role in only if role not in there]:
        raise ConfigError(
            f"--only {','.join(absent)}: no such process here, but {', '.join(sorted(there))}; "
            "followers need --processes 2, faces server.processes"
        )
    if (count := sum(len(there[role]) for role in only or there)) < together:
        raise ConfigError(f"--together {together}: the roles to choose from have {count} processes")


def _storm(options: argparse.Namespace, kinds: Sequence[str], only: Sequence[str]) -> Found:
    if not LAUNCHER.exists():
        raise ConfigError(f"{LAUNCHER}: not there; chaos runs from the source tree alone")
    # The launcher has addresses of its own.
    elsewhere = ["fleet.prefill=[]", "fleet.domains=[]"]
    deployment = read_deployment(options.config, options.model, [*options.set, *elsewhere])
    longest = deployment.scheduler.max_length // 2
    asked = questions(options.seed, options.questions, longest, options.vocab, options.systems)
    known = answers(asked, options.config, options.model, options.set)
    print(f"{len(asked)} answers are known", flush=True)
    minutes = options.minutes or (1.0 if options.kills is None else 1e6)
    plan = Plan(
        seed=options.seed,
        kinds=kinds,
        together=options.together,
        only=only,
        minutes=minutes,
        most=options.kills or 10**9,
        clients=options.clients,
        calm=options.calm,
        requests=options.requests or 0,
        resets=options.resets,
        cancelled=options.cancelled,
        faces=options.faces.split(","),
    )
    with tempfile.TemporaryDirectory(prefix="jaxserve-chaos-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        admin = f"127.0.0.1:{free_port()}"
        running = Deployment(_launch(options, admin), folder)
        try:
            running.wait(lambda: bool(running.processes), START_SECONDS, "a first process")
            running.wait(running.whole, START_SECONDS, "the start of all processes")
            check_victims(only, running.roles(), plan.together)
            storm = Storm(running, plan, asked, known, admin)
            found = asyncio.run(storm.judge() if plan.requests else storm.run())
        finally:
            code = running.end()
        if code:
            found.late.append(f"the launcher ended with {code}\n{running.last_words()}")
        return found


def _launch(options: argparse.Namespace, admin: str) -> list[str]:
    arguments = ["--fleet", "--processes", f"{options.processes}"]
    arguments += ["--standbys", f"{options.standbys}"]
    if not options.requests:
        arguments += ["--apart", "--restart", "--restart-seconds", f"{options.restart_seconds:g}"]
    for name in ("config", "model"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name}", value]
    # A router that is started again has to be where clients look for it.
    ports = [f"server.{face}_port={free_port()}" for face in ("http", "grpc")]
    admin_port = f"server.admin_port={admin.rpartition(':')[2]}"
    for one in [*options.set, *ports, *([admin_port] if options.resets else [])]:
        arguments += ["--set", one]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

"""`python -m jaxserve.chaos --config FILE --minutes M --seed S`: faults under load with known
answers. With `--requests N` it causes no fault: it asks N requests and compares their answers.

Starts a fleet with `jaxserve.launch.local`, whose supervisor starts dead processes again. Exit code
0: no wrong token, no hang, no lost request, every fault noticed and recovered from in time; 1:
something missed its limit; 2: a wrong option.
"""

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path

import msgspec

from jaxserve.bench.report import Part, amount, count, publish
from jaxserve.chaos.deployment import RunningDeployment
from jaxserve.chaos.figures import Found, parts
from jaxserve.chaos.questions import answers, questions
from jaxserve.chaos.schedule import KINDS
from jaxserve.chaos.storm import START_SECONDS, Storm, StormPlan
from jaxserve.config.command_line import add_deployment_arguments, add_options, read_deployment
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.ports import free_port

ROLES = ("router", "prefill", "domain", "attention", "ffn", "follower", "face", "pages")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a storm and prints its figures. Returns the exit code."""
    made = parser()
    options = made.parse_args(arguments)
    if options.resets and not options.requests:
        made.error("--resets: only with --requests")
    if options.config is None and options.model is None:
        made.error("--config or --model: expected one of them")
    try:
        return publish("chaos", _measured(options), options)
    except ConfigError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except JaxserveError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1


def some_of(*known: str) -> Callable[[str], list[str]]:
    """Returns the type of options that take some of these words, as in `kill,stop`."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := sorted(set(words) - set(known)):
            wrong, right = ", ".join(unknown), ", ".join(known)
            raise argparse.ArgumentTypeError(f"{wrong}: expected some of {right}")
        return words

    parse.__name__ = ", ".join(known)  # `%(type)s` in the help
    return parse


def part(text: str) -> float:
    """Type of options that take a part of a whole."""
    if text not in ("0", "0.0") and amount(text) > 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to 1")
    return float(text)


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the options."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.chaos",
        description="Faults on purpose in a fleet on this host, under load with known answers.",
    )
    add_deployment_arguments(made)
    readers = {"amount": amount, "count": count, "faces": some_of("http", "grpc"), "part": part}
    readers |= {"kinds": some_of(*KINDS), "roles": some_of(*ROLES)}
    add_options(made, Path(__file__).with_name("options.yaml"), readers)
    return made


def check_victims(only: Sequence[str], there: Mapping[str, Sized], together: int) -> None:
    """Raises ConfigError if `only` names absent roles, or roles of fewer than `together`."""
    if absent := [role for role in only if role not in there]:
        raise ConfigError(
            f"--only {','.join(absent)}: no such process here, but {', '.join(sorted(there))}; "
            "followers need --processes 2, faces server.processes"
        )
    if (count := sum(len(there[role]) for role in only or there)) < together:
        raise ConfigError(f"--together {together}: the roles to choose from have {count} processes")


def _measured(options: argparse.Namespace) -> Iterator[Part]:
    yield from parts(_storm(options))


def _storm(options: argparse.Namespace) -> Found:
    # The launcher chooses its own addresses.
    elsewhere = ["fleet.prefill=[]", "fleet.domains=[]"]
    deployment = read_deployment(options.config, options.model, [*options.set, *elsewhere])
    longest = deployment.scheduler.max_length // 2
    asked = questions(options.seed, options.questions, longest, options.vocab, options.systems)
    known = answers(asked, options.config, options.model, options.set)
    print(f"{len(asked)} answers are known", flush=True)
    if options.minutes is None:
        options.minutes = 1.0 if options.kills is None else math.inf
    options.kills = options.kills or 10**9
    plan = msgspec.convert(vars(options), StormPlan)
    with tempfile.TemporaryDirectory(prefix="jaxserve-chaos-") as temporary:
        folder = options.keep or Path(temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--keep {folder}: {error.strerror}") from None
        admin = f"127.0.0.1:{free_port()}"
        running = RunningDeployment(_launch(options, admin), folder)
        try:
            running.wait(lambda: bool(running.processes), START_SECONDS, "a first process")
            running.wait(running.whole, START_SECONDS, "the start of all processes")
            check_victims(options.only, running.roles(), plan.together)
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
        arguments += ["--warm-spares"] * options.warm_spares
    for name in ("config", "model"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name}", value]
    # Clients have to find a restarted router at the same address.
    ports = [f"server.{face}_port={free_port()}" for face in ("http", "grpc")]
    admin_port = f"server.admin_port={admin.rpartition(':')[2]}"
    for one in [*options.set, *ports, *([admin_port] if options.resets else [])]:
        arguments += ["--set", one]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

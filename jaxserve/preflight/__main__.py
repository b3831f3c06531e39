"""`python -m jaxserve preflight --config FILE`: the checks before the first start, on every host.

Takes the options of `serve` and runs on every host with the same command. Nothing is served and no
weights are read. Prints a table of checks (passed, skipped, failed with the reason) and writes
every measured time into a JSON file, which `plan calibrate`, `verify` and `estimate` read. Exit
codes: 0 no check failed on any process, 1 one failed, 2 the configuration is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxserve import ports, serve
from jaxserve.commands import doctor
from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.fleet.arguments import add_arguments as add_process_arguments
from jaxserve.link.session import tls
from jaxserve.logs import configure
from jaxserve.preflight import hosts, kernels
from jaxserve.preflight.children import pull_steps, role_of, run_on_devices, run_part
from jaxserve.preflight.meeting import Meeting
from jaxserve.preflight.outcomes import Check, Failed, Outcome, Skipped, count, run, table
from jaxserve.preflight.record import default_path, planned, record, write

BEGIN_SECONDS = 600.0
"""Time for all processes to start: images are pulled meanwhile."""
SLACK_SECONDS = 30.0
"""Time for a process that hears of a failure to end its part of a check."""
SEVERAL = ("memory", "links", "exchange", "layer", "steps")
"""Checks that all processes of a runtime run together."""


PROCESS = (
    *("process_id", "processes", "coordinator", "control", "control_bind", "slice", "slices"),
    "host_process",
)
"""Options of a process that its checks on devices take, too."""


SHARED = (
    *("link.transport=pull", 'link.addresses=["127.0.0.1:9300"]', "attention.runtime=attention"),
    *("ffn.runtime=ffn", "attention.memory_gb=4", "ffn.memory_gb=4"),
)
"""Keys of the demo as two processes on one device."""
ON_ONE_DEVICE = (
    *("mode=colocated", "attention.dp=1", "attention.tp=1", "link.transport=auto"),
    *("attention.processes=0", "ffn.exchange=gather", "cache.pages=256", "scheduler.slots=16"),
    *("scheduler.max_length=1024", "scheduler.token_budget=128"),
    *("scheduler.token_buckets=[]", "scheduler.page_buckets=[]"),
)
"""Keys of a deployment cut down to one device."""


class Step(NamedTuple):
    """One check of the list."""

    name: str
    check: Check
    together: bool = False
    """True if all processes begin the check at the same time."""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="jaxserve preflight",
        description="Check hosts, devices and links, and measure them, before a deployment serves.",
    )
    add_deployment_arguments(made)
    add_process_arguments(made)
    add = made.add_argument
    add("--only", type=_names, default=[], metavar="NAME,NAME", help="these checks alone")
    add("--seconds", type=float, default=600.0, help="deadline of one check on devices (600)")
    add(
        "--layers",
        type=int,
        default=0,
        metavar="N",
        help="check the first N layers of the model: random weights of all take long (0: all)",
    )
    add("--json", type=Path, metavar="FILE", help="results (measured/DEVICE-DATE.json)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all checks; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    made = parser()
    options, others = made.parse_known_args(given)
    if others:  # files of `launch --preflight` have options that concern serving alone
        serve.parser().parse_args(["--config", "demo", *others])
    if options.config is None and options.model is None:
        made.error("one of the arguments --config --model is required")
    configure("text")
    try:
        process = from_arguments(options)
        deployment = read_deployment(options.config, options.model, options.set)
        ports.use(deployment.cluster.ports)
        tls.use(deployment.cluster.tls)
        if process.host_processes > 1:
            return run_on_devices(process, given)
    except (ConfigError, CheckpointError) as error:
        print(f"jaxserve preflight: {error}", file=sys.stderr)
        return 2
    with Meeting(process) as meeting:
        return Preflight(options, process, deployment, meeting).run()


class Preflight:
    """The checks of one process and their outcomes."""

    def __init__(
        self,
        options: argparse.Namespace,
        process: ProcessArguments,
        deployment: Deployment,
        meeting: Meeting,
    ):
        self._options, self._process = options, process
        self._deployment, self._meeting = deployment, meeting
        self._outcomes: list[Outcome] = []
        self._broken = ""
        """Why the processes cannot meet any more; empty: they can."""

    def run(self) -> int:
        """Runs everything and prints the table; returns the exit code."""
        self._do(Step("processes", self._begin))
        steps, only = [*self._steps()], self._options.only
        chosen = [step for step in steps if not only or step.name in only]
        if not chosen and self._meeting.count == 1:  # others may have a check that this one lacks
            names = ", ".join(step.name for step in steps)
            print(f"jaxserve preflight: --only {','.join(only)}: the checks are {names}")
            return 2
        for step in chosen:
            self._do(step)
        return self._end()

    def _begin(self) -> tuple[str, dict[str, Any]]:
        try:
            self._meeting.begin(BEGIN_SECONDS)
        except Failed as failed:
            self._broken = str(failed)
            raise
        if self._meeting.count == 1:
            raise Skipped("one process")
        return f"{self._meeting.count} processes are here", {}

    def _steps(self) -> Iterator[Step]:
        meeting, process, deployment = self._meeting, self._process, self._deployment
        yield Step("versions", lambda: hosts.versions(meeting), True)
        named = [process.control_address, process.coordinator] if process.processes > 1 else []
        yield Step("ports", lambda: hosts.ports(meeting, deployment, named), True)
        yield Step("clock", lambda: hosts.clock(meeting), True)
        probe = cache(doctor.probe)
        yield Step("devices", lambda: hosts.devices(probe()))
        for name, check in kernels.checks(probe, self._options.seconds):
            yield Step(name, check)
        if process.processes == 1 and process.role == "":
            yield from self._sharing(probe)
        for part, title in self._parts():
            words, seconds = self._words(part), self._options.seconds
            if part != "prefill" and deployment.topology.crosses_runtimes:
                if role_of(process, meeting) != "attention":
                    own = [*words, "--role", "ffn"]
                    yield Step(f"{title}exchange", partial(run_part, "exchange", own, seconds))
                check = partial(pull_steps, deployment, process, meeting, words, seconds)
                yield Step(f"{title}steps", check, True)
                continue
            for name in SEVERAL:
                yield Step(title + name, partial(run_part, name, words, seconds), not part)

    def _sharing(self, probe: Callable[[], Mapping[str, Any]]) -> Iterator[Step]:
        """Checks for a single device, whatever the deployment: both roles of the demo in processes
        that share it, and layers with the shapes of Qwen3."""

        def alone(check: Check) -> Check:
            def run() -> tuple[str, dict[str, Any]]:
                if probe().get("devices") != 1 and not self._options.only:
                    raise Skipped("for hosts of one device")
                return check()

            return run

        seconds = self._options.seconds
        demo = ["--config", "demo", *(f"--set={item}" for item in SHARED)]
        deployment = read_deployment("demo", None, SHARED)
        shared = partial(pull_steps, deployment, self._process, self._meeting, demo, seconds)
        yield Step("shared device", alone(shared))
        qwen3 = ["--config", "qwen3-30b-a3b", "--layers", "2"]
        qwen3 += [f"--set={item}" for item in ON_ONE_DEVICE]
        yield Step("qwen3 shapes", alone(partial(run_part, "steps", qwen3, seconds)))

    def _parts(self) -> list[tuple[str, str]]:
        """The workers of a fleet, by `--part` of `worker.py`, and how their checks are named."""
        role = self._process.role
        if not self._deployment.prefill.workers or role == "router":
            return [] if role == "router" else [("", "")]
        both = [("prefill", "prefill "), ("decode", "domain ")]
        return [one for one in both if not role or (one[0] == "prefill") == (role == "prefill")]

    def _words(self, part: str) -> list[str]:
        """Options of `worker.py`: those of this command that name deployment and process."""
        options, words = self._options, self._deployment_words()
        if options.model is not None:
            words += ["--model", options.model]
        own = ["--part", part, "--layers", str(options.layers)]
        if part:  # a worker of a fleet has a runtime for itself
            return [*words, *own]
        for name in PROCESS:
            if (value := getattr(options, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if options.distributed:
            words.append("--distributed")
        return [*words, *own]

    def _deployment_words(self) -> list[str]:
        named = [] if self._options.config is None else ["--config", self._options.config]
        return [*named, *(f"--set={item}" for item in self._options.set)]

    def _do(self, step: Step) -> None:
        print(f"{step.name} …", file=sys.stderr, flush=True)
        outcome = run(
            step.name, lambda: self._checked(step), time.monotonic, self._process.process_id
        )
        self._outcomes.append(outcome)

    def _checked(self, step: Step) -> tuple[str, dict[str, Any]]:
        if step.together and self._broken:
            raise Skipped(f"the processes do not meet: {self._broken}")
        if step.together and self._meeting.count > 1:
            try:
                self._meeting.gather(step.name, self._options.seconds + SLACK_SECONDS)
            except Failed as failed:
                self._broken = str(failed)
                raise
        return step.check()

    def _end(self) -> int:
        every = self._outcomes
        if not self._broken:
            seconds = self._options.seconds + SLACK_SECONDS
            try:
                all_of = self._meeting.gather(self._outcomes, seconds)
                every = [one for own in msgspec.convert(all_of, list[list[Outcome]]) for one in own]
            except Failed as failed:
                self._broken = str(failed)
        where = self._write(every) if self._process.is_leader else ""
        print(table(every))
        failures = count(every, "failed")
        done = f"{count(every, 'passed')} passed, {count(every, 'skipped')} skipped"
        print(f"{done}, {failures} failed")
        if self._broken:
            print(f"processes: {self._broken}")
        if where:
            print(f"every time: {where}")
        return int(failures > 0 or bool(self._broken))

    def _write(self, every: list[Outcome]) -> str:
        """Writes the file, and adds to the outcomes how the planner takes it."""
        path, tree = self._options.json or default_path(every), record(every)
        write(path, tree)

        def measurements() -> tuple[str, dict[str, Any]]:
            if not tree["spans"]:
                raise Skipped("no steps of attention and ffn were recorded")
            try:
                found = planned(path, self._deployment_words(), tree["device_kind"])
            except ConfigError as error:
                raise Skipped(str(error)) from None
            tree["measurements"] += found
            write(path, tree)
            return f"{len(found)} times of stages for plan calibrate, verify and search", {}

        every.append(run("measurements", measurements, time.monotonic))
        return str(path)


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())

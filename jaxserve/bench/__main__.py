"""`python -m jaxserve.bench NAME`: all benchmarks by name."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxserve.bench import (
    compare,
    contexts,
    domains,
    drafts,
    experts,
    front,
    hand_off,
    load,
    mixes,
    pipelines,
    quality,
    router,
    serving,
    stages,
    startup,
    step_host,
)
from jaxserve.bench.report import Part, add_report_arguments, publish
from jaxserve.errors import JaxserveError


class Bench(NamedTuple):
    """A benchmark without options of its own: its line in `--help`, and what measures its parts,
    by name. The argument asks for a quick smoke test."""

    help: str
    parts: Mapping[str, Callable[[bool], Iterable[Part]]]


BENCHES = {
    "pipeline": Bench(
        "host time, overlap, whole steps, start-up",
        {
            "host": pipelines.measure_host,
            "overlap": pipelines.measure_overlap,
            "steps": mixes.measure_steps,
            "startup": startup.measure,
        },
    ),
    "fleet": Bench("hand-off of KV pages", {"hand-off": hand_off.measure}),
    "domains": Bench("attention workers on one ffn worker", {"domains": domains.measure}),
    "engine": Bench(
        "shared prefixes, sampling options, conversations beyond the pool, long contexts",
        {
            "prefixes": mixes.measure_prefixes,
            "sampling": mixes.measure_sampling,
            "conversations": contexts.measure_conversations,
            "long": contexts.measure_long,
        },
    ),
    "front": Bench("the network faces, over an engine stub", {"front": front.measure}),
    "quality": Bench(
        "held-out bits a byte of every number format",
        {
            "formats": quality.measure,
            "outliers": quality.measure_outliers,
            "int4": quality.measure_int4,
        },
    ),
    "load": Bench("load of a checkpoint, next to cat on its files", {"load": load.measure}),
    "host": Bench("the leader's Python a lane and step", {"host": step_host.measure}),
    "router": Bench("one router before a thousand stub workers", {"router": router.measure}),
    "drafts": Bench("the gain of drafts on the demo model", {"drafts": drafts.measure}),
    "experts": Bench("the gain of moving experts", {"experts": experts.measure}),
}
COMMANDS = {"compare": compare, "stages": stages, "serve": serving}
"""Benchmarks with options of their own."""


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the command."""
    made = argparse.ArgumentParser(prog="python -m jaxserve.bench", description="Measure.")
    names = made.add_subparsers(dest="bench", required=True)
    for name, bench in BENCHES.items():
        options = names.add_parser(name, help=bench.help)
        add_report_arguments(options)
        options.add_argument(
            "--only",
            type=lambda text: text.split(","),
            default=list(bench.parts),
            metavar="PARTS",
            help=f"some of {','.join(bench.parts)}",
        )
    for name, command in COMMANDS.items():
        command.add_arguments(names.add_parser(name, help=command.HELP))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark; 0 if every target is met, 1 if one is missed, 2 if it could not be run."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        if options.bench in COMMANDS:
            return COMMANDS[options.bench].run(options)
        parts = BENCHES[options.bench].parts
        if unknown := sorted(set(options.only) - set(parts)):
            made.error(f"--only: {', '.join(unknown)} is not in {','.join(parts)}")
        measured = (part for name in options.only for part in parts[name](options.quick))
        return publish(options.bench, measured, options)
    except JaxserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

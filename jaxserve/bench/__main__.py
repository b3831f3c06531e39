"""`python -m jaxserve.bench NAME`: the benches by name."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench import (
    compare,
    drafts,
    experts,
    fleet,
    front,
    kills,
    load,
    machine,
    peers,
    pipeline,
    plans,
    quality,
    router,
    serving,
    stages,
    step_host,
)
from jaxserve.bench import options as sampling_options
from jaxserve.bench.tokens import CONFIG
from jaxserve.errors import JaxserveError


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(prog="python -m jaxserve.bench", description="Measure.")
    benches = made.add_subparsers(dest="bench", required=True)
    of_pipeline = benches.add_parser("pipeline", help="host time, overlap, tokens/s, start-up")
    of_pipeline.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_pipeline.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(pipeline.PARTS),
        metavar="PARTS",
        help=f"some of {','.join(pipeline.PARTS)}",
    )
    of_pipeline.add_argument("--quick", action="store_true", help="few rounds: a smoke test")
    of_fleet = benches.add_parser("fleet", help="domains on one ffn worker")
    of_fleet.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_fleet.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(fleet.PARTS),
        metavar="PARTS",
        help=f"some of {','.join(fleet.PARTS)}",
    )
    of_fleet.add_argument("--quick", action="store_true", help="few rounds: a smoke test")
    of_quality = benches.add_parser("quality", help="held-out bits a byte of every number format")
    of_quality.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_quality.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(quality.PARTS),
        metavar="PARTS",
        help=f"some of {','.join(quality.PARTS)}",
    )
    of_quality.add_argument("--quick", action="store_true", help="few formats, little text")
    of_load = benches.add_parser("load", help="load of a checkpoint, next to cat on its files")
    of_load.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_load.add_argument("--quick", action="store_true", help="a small checkpoint: a smoke test")
    of_peers = benches.add_parser("peers", help="weights from a running worker, next to files")
    of_peers.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_peers.add_argument("--quick", action="store_true", help="a small model: a smoke test")
    of_engine = benches.add_parser("engine", help="shared prefixes, and what options cost")
    of_engine.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_engine.add_argument("--quick", action="store_true", help="one round: a smoke test")
    of_front = benches.add_parser("front", help="the network faces, over an engine stub")
    of_front.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_front.add_argument("--quick", action="store_true", help="few tokens: a smoke test")
    of_host = benches.add_parser("host", help="the leader's Python a lane and step")
    of_host.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_host.add_argument("--quick", action="store_true", help="few sequences: a smoke test")
    of_plans = benches.add_parser("plans", help="the leader's CPU for plans to followers")
    of_plans.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_plans.add_argument("--quick", action="store_true", help="few followers: a smoke test")
    of_router = benches.add_parser("router", help="one router before a thousand stub workers")
    of_router.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_router.add_argument("--quick", action="store_true", help="few workers: a smoke test")
    of_drafts = benches.add_parser("drafts", help="what drafts gain on the demo model")
    of_drafts.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_drafts.add_argument("--quick", action="store_true", help="one round: a smoke test")
    of_experts = benches.add_parser("experts", help="what moving experts gains and costs")
    of_experts.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_experts.add_argument("--quick", action="store_true", help="few rounds: a smoke test")
    compare.add_arguments(benches.add_parser("compare", help="a folder beside transformers"))
    of_kills = benches.add_parser("kills", help="ffn workers are killed while requests run")
    of_kills.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    of_kills.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="deployment")
    of_kills.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    of_kills.add_argument("--kills", type=int, default=100, help="how many (100)")
    of_kills.add_argument("--standbys", type=int, default=0, help="further ffn workers (0)")
    machine.add_arguments(
        benches.add_parser("machine", help="a hardware file of a core of this one")
    )
    stages.add_arguments(benches.add_parser("stages", help="a timeline of batches and contexts"))
    serving.add_arguments(benches.add_parser("serve", help="load on a running server"))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a bench; 0 if every target is met, 1 if one is missed, 2 if it could not be run."""
    made = parser()
    options = made.parse_args(arguments)
    for bench in (pipeline, fleet, quality):
        known = bench.PARTS
        name = bench.__name__.rpartition(".")[2]
        if options.bench == name and (unknown := set(options.only) - set(known)):
            made.error(f"--only: {', '.join(sorted(unknown))} is not in {','.join(known)}")
    try:
        if options.bench == "serve":
            return serving.run(options)
        if options.bench == "machine":
            return machine.run(options)
        if options.bench == "stages":
            return stages.run(options)
        if options.bench == "compare":
            return compare.run(options)
        if options.bench == "kills":
            return kills.run(
                options.config, options.kills, options.standbys, options.set, options.json
            )
        if options.bench == "front":
            return front.run_bench(options.quick, options.json)
        if options.bench == "router":
            return router.run(options.quick, options.json)
        if options.bench == "drafts":
            return drafts.run(options.quick, options.json)
        if options.bench == "experts":
            return experts.run(options.quick, options.json)
        if options.bench == "host":
            return step_host.run(options.quick, options.json)
        if options.bench == "plans":
            return plans.run(options.quick, options.json)
        if options.bench == "load":
            return load.run(options.quick, options.json)
        if options.bench == "peers":
            return peers.run(options.quick, options.json)
        if options.bench == "engine":
            return sampling_options.run(options.quick, options.json)
        if options.bench == "quality":
            return quality.run(options.only, options.quick, options.json)
        if options.bench == "fleet":
            return fleet.run(options.only, options.quick, options.json)
        return pipeline.run(options.only, options.quick, options.json)
    except JaxserveError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""One process of a two-process run of `layouts.py`: started by `launch/local.py`, see
`test_layouts_processes.py`. Process 0 leads an engine through all prompts, with --figures until the
pipeline was measured, and writes the tokens of the last round and what was seen of the pipeline."""

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec

from jaxserve.cluster import bootstrap, roles
from jaxserve.cluster.leader import Leader
from tests.jaxserve import layouts

SECONDS = 120
"""How long the pipeline may take to be measured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    bootstrap.add_arguments(parser)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--overrides", type=json.loads, required=True)
    parser.add_argument("--written", type=Path, required=True)
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    deployment = layouts.deployment(options.model, options.overrides)
    peers = bootstrap.join(
        bootstrap.from_arguments(options), deployment, lambda error: bootstrap.abandon(str(error))
    )
    if isinstance(peers, Leader):
        engine = roles.lead(deployment, peers)
        engine.pipeline()  # Asking has it measured.
        tokens, view = layouts.generate(engine), engine.pipeline()
        deadline = time.monotonic() + SECONDS
        while options.figures and view.measured_at is None and time.monotonic() < deadline:
            tokens = layouts.generate(engine)
            view = engine.pipeline()
        layouts.idle(engine)
        engine.close()
        options.written.write_bytes(msgspec.json.encode({"tokens": tokens, "view": view}))
    else:
        roles.follow(deployment, peers)
    bootstrap.leave(peers)


if __name__ == "__main__":
    sys.exit(main())

"""One process of a two-process run of `layouts.py`: started by `launch/local.py`, see
`test_layouts_processes.py`. Process 0 leads an engine through all prompts and writes the tokens,
or, with --figures, goes on until the pipeline was measured and writes what was seen of it."""

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
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    deployment = layouts.deployment(options.model, options.overrides)
    peers = bootstrap.join(
        bootstrap.from_arguments(options), deployment, lambda error: bootstrap.abandon(str(error))
    )
    if isinstance(peers, Leader):
        engine = roles.lead(deployment, peers)
        view, tokens = engine.pipeline(), layouts.generate(engine)
        deadline = time.monotonic() + SECONDS
        while options.figures and view.measured_at is None and time.monotonic() < deadline:
            layouts.generate(engine)
            view = engine.pipeline()
        layouts.idle(engine)
        engine.close()
        written = msgspec.json.encode(view) if options.figures else json.dumps(tokens).encode()
        options.tokens.write_bytes(written)
    else:
        roles.follow(deployment, peers)
    bootstrap.leave(peers)


if __name__ == "__main__":
    sys.exit(main())

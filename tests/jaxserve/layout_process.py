"""One process of a two-process run of `layouts.py`: started by `launch/local.py`, see
`test_layouts_processes.py`. Process 0 leads an engine through all prompts and writes the tokens."""

import argparse
import json
import sys
from pathlib import Path

from jaxserve.cluster import bootstrap, roles
from jaxserve.cluster.leader import Leader
from tests.jaxserve import layouts


def main() -> None:
    parser = argparse.ArgumentParser()
    bootstrap.add_arguments(parser)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--overrides", type=json.loads, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    options = parser.parse_args()
    deployment = layouts.deployment(options.model, options.overrides)
    peers = bootstrap.join(
        bootstrap.from_arguments(options), deployment, lambda error: bootstrap.abandon(str(error))
    )
    if isinstance(peers, Leader):
        engine = roles.lead(deployment, peers)
        tokens = layouts.generate(engine)
        layouts.idle(engine)
        engine.close()
        options.tokens.write_text(json.dumps(tokens))
    else:
        roles.follow(deployment, peers)
    bootstrap.leave(peers)


if __name__ == "__main__":
    sys.exit(main())

"""A runtime of `test_runtimes.py`: `serve` for the ffn role; for attention an engine without
network faces that runs all prompts of `layouts.py` in rounds, each when it is told, beside requests
that begin alike and are cancelled, and prints the tokens."""

import json
import os
import sys
import time
from pathlib import Path

import jax

from jaxserve import serve
from jaxserve.config.command_line import read_deployment
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import from_arguments
from jaxserve.fleet.assembly import Options, open_engine, open_follower
from jaxserve.fleet.expert_control import Restore
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.following import Following
from jaxserve.fleet.remote_experts import RemoteExperts
from tests.jaxserve import layouts

SECONDS = 240


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody wrote {path}"
        time.sleep(0.01)


def begin_moves(experts: RemoteExperts) -> None:
    """Experts change ranks from now on, slowly, once all are where an earlier worker had them."""
    deadline = time.monotonic() + SECONDS
    while True:
        experts.look()
        assert experts._found is not None
        if not experts.view().moving and experts._remembered is experts._found:
            break
        assert time.monotonic() < deadline, experts.view()
        time.sleep(0.05)
    turned = {layer: slots[::-1] for layer, slots in experts._found.placements.items()}
    print(f"experts {sorted(experts._found.placements.items())}", flush=True)
    found = experts._question(Restore(turned))
    print(f"moving {found.view.moving}", flush=True)


def main() -> int:
    options = serve.parse(serve.parser(), sys.argv[1:])
    if options.role == "ffn":
        return serve.main(sys.argv[1:])
    print(f"'jax': '{jax.__version__}'", flush=True)
    deployment = read_deployment(options.config, options.model, options.set)
    process = from_arguments(options)
    given = Options(token=process.token)
    with bootstrap.joined(process, deployment) as peers:
        if isinstance(peers, Follower):
            Following(open_follower(deployment, peers, given), peers).run()
            return 0
        engine = open_engine(deployment, given, peers)
        for number in range(int(os.environ["ROUNDS"])):
            wait_for(Path(os.environ["TOLD"]) / str(number))
            if number and "MOVES" in os.environ:
                begin_moves(engine.experts)
            print(f"round {number} begins", flush=True)
            prompts = json.loads(os.environ.get("PROMPTS", json.dumps(layouts.PROMPTS)))
            dropped = [[*prompt, 1] for prompt in prompts[:6]]
            tokens = layouts.beside_cancels(engine, prompts, dropped, layouts.GREEDY)
            layouts.idle(engine)
            print(f"round {number}: {json.dumps(tokens)}", flush=True)
        work, _ = engine.experts.passes(SECONDS)
        print(f"passes {work.passes} of {work.messages} messages", flush=True)
        print(f"compilations {engine.compilations_after_ready}", flush=True)
        print(f"resends {engine.link.counters.resends}", flush=True)
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An ffn worker in a runtime of its own: a message server, which knows neither plans nor requests.

Called by `serve --role ffn`. It may be killed at any time: attention workers send again what it has
not answered, to its successor or to a standby.
"""

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType

import jax
import numpy as np

from jaxserve.checkpoint.store import open_checkpoint
from jaxserve.config.deployment import Deployment
from jaxserve.engine.build import load_progress
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.role_runtime import RoleRuntime, deadlines_of, open_role, token_sizes
from jaxserve.link.channel import listen
from jaxserve.link.landing import Landing
from jaxserve.link.message import message_formats
from jaxserve.link.pull_server import PullServer
from jaxserve.roles.compilation import compile_all
from jaxserve.roles.ffn import FFNWorker, ffn_executables, ffn_programs
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.weights import FFNWeights, LeafSource

LOOK_SECONDS = 0.1
"""How often the main thread, which alone runs the handlers of signals, wakes up."""


def answer_messages(
    deployment: Deployment, process: ProcessArguments, address_given: str | None
) -> int:
    """The life of an ffn worker with a runtime of its own, until a signal ends it."""
    signals: list[int] = []
    server = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        if server is None:
            raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    with bootstrap.joined(process, deployment):
        address = address_given or deployment.link.addresses[0]
        listen(address, process.token).close()  # refuses it before the model is loaded
        server = open_ffn(deployment, process.token, address)
        print(f"ready  role=ffn  link={server.start()}", flush=True)
        while not signals:
            time.sleep(LOOK_SECONDS)
        server.close()
    return 0


def open_ffn(deployment: Deployment, token: str, address: str) -> PullServer:
    """A warm ffn worker that answers messages at the address; `start` it.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    role = open_role(deployment, "ffn")
    source = open_checkpoint(deployment.model, role.names)
    return message_server(role, deployment, source, token, address)


def message_server(
    role: RoleRuntime, deployment: Deployment, source: LeafSource, token: str, address: str
) -> PullServer:
    """The ffn worker of this runtime, loaded, compiled and run once, behind its end of the link."""
    programs = FFNPrograms(role.templates, deployment, role.mesh)
    sizes = token_sizes(deployment)
    with load_progress(source, role.config.layers) as counted:
        weights = FFNWeights(counted, role.names, programs)
    compiled = compile_all(ffn_programs(programs, sizes))
    worker = FFNWorker(programs, ffn_executables(programs, sizes, compiled), weights)
    landing = Landing(programs.route, role.mesh)
    formats = message_formats(role.contract)

    def shapes(kind: str, tokens: int) -> list[jax.ShapeDtypeStruct]:
        message = formats[kind]  # type: ignore[index]
        return landing.shapes((role.contract.piece_rows(tokens), message.width), message.word)

    def run(kind: str, layer: int, tokens: int, pieces: Sequence[jax.Array]) -> list[jax.Array]:
        return landing.pieces(worker.answer(layer, tokens, landing.assemble(pieces)))

    for tokens in sizes:
        for kind in formats:
            nothing = [
                jax.device_put(np.zeros(s.shape, s.dtype), s.sharding) for s in shapes(kind, tokens)
            ]
            jax.block_until_ready(run(kind, role.contract.layers.index(kind), tokens, nothing))
    return PullServer(
        address,
        role.hello,
        token,
        run,
        mesh=role.mesh,
        message_shapes=shapes,
        deadlines=deadlines_of(deployment),
    )

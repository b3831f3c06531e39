"""An attention worker in a runtime of its own: an engine around it, ffn workers elsewhere.

Called by `serve --role attention`. It goes on while ffn workers are stopped and started again.
"""

from collections.abc import Callable

import jax

from jaxserve.checkpoint.store import open_folder
from jaxserve.config.deployment import Deployment
from jaxserve.config.special_tokens import read_special_tokens
from jaxserve.engine.engine import Engine
from jaxserve.engine.first_token import start_checked
from jaxserve.engine.make_engine import make_engine
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.fleet.expert_control import RemoteExperts
from jaxserve.fleet.role_runtime import RoleRuntime, deadlines_of, open_role
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.ends import ReceiveAnswer, SendMessage, piece_sharding
from jaxserve.link.dispatch.message import answer_format
from jaxserve.link.remote.client import PullClient
from jaxserve.roles.attention import AttentionWorker, build_attention
from jaxserve.roles.capacity import deployment_buckets, token_sizes
from jaxserve.roles.cell import Cell, Workers
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.weights import LeafSource, OpenSource
from jaxserve.roles.worker import Observer


class PullEnd:
    """An attention worker's end of a link to another runtime (`link.ends.AttentionEnd`)."""

    def __init__(self, client: PullClient, contract: Contract):
        self._client, self._contract = client, contract

    def sender(self, layer: int, tokens: int, lane: int) -> SendMessage:
        """For messages of a layer, in a lane's steps of so many tokens a DP group."""
        send, kind = self._client.send, self._contract.layers[layer]
        rows = self._contract.piece_rows(tokens)
        return lambda message: send(lane, kind, layer, rows, message)

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        """For the answers to them; waits until one is there."""
        receive = self._client.receive
        return lambda: (receive(lane),)


def open_attention(
    deployment: Deployment,
    token: str,
    *,
    observer: Observer | None = None,
    open_source: OpenSource = open_folder,
    prepare: Callable[[Engine], object] = lambda engine: None,
) -> tuple[Engine, PullClient]:
    """A warm, running engine over the attention worker of this runtime; `prepare` is called before
    it is started.

    Raises:
      ConfigError: every ffn worker refuses this one, naming what differs.
      EngineFailedError: no ffn worker came within `link.absent_seconds`.
    """
    ends = read_special_tokens(deployment.model).eos
    role = open_role(deployment, "attention")
    source = open_source(deployment, role.names)
    cell, client = attention_cell(role, deployment, source, token, observer)
    runtime = Runtime(deployment, role.config, cell, deployment_buckets(deployment))
    warm_up(runtime)
    experts = RemoteExperts(client.ask) if role.config.experts else None
    engine = make_engine(runtime, experts=experts, eos_token_ids=ends)
    engine.find_problems = lambda: client.problems
    prepare(engine)
    start_checked(engine)
    return engine, client


def attention_cell(
    role: RoleRuntime,
    deployment: Deployment,
    source: LeafSource,
    token: str,
    observer: Observer | None = None,
) -> tuple[Cell, PullClient]:
    """The attention worker of this runtime, loaded, compiled and connected; raises as above."""
    sharding, answer = piece_sharding(role.mesh), answer_format(role.contract)

    def answer_shape(kind: str, rows: int) -> jax.ShapeDtypeStruct:
        shape = role.mesh.size * rows, answer.width
        return jax.ShapeDtypeStruct(shape, answer.dtype, sharding=sharding)

    built = build_attention(role.templates, deployment, role.mesh, source, role.names)
    client = PullClient(
        deployment.link.addresses,
        role.hello,
        token,
        domain=role.hello.worker,
        mesh=role.mesh,
        answer_shape=answer_shape,
        rows=[role.contract.piece_rows(tokens) for tokens in token_sizes(deployment)],
        deadlines=deadlines_of(deployment),
    )
    client.connect()
    worker = AttentionWorker(*built, PullEnd(client, role.contract))
    rotation = Rotation(role.config.layers, deployment.lanes, gated=True)
    workers, predicts = Workers(attention=(worker,)), bool(role.config.modules)
    return Cell(workers, rotation, deployment.lanes, observer, predicts=predicts), client

"""Attention worker in a runtime of its own, with ffn workers in other runtimes.

Called by `assembly.py` for `serve --role attention`. It keeps running while ffn workers are stopped
and started again.
"""

import pkgutil
import secrets
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxserve.config.deployment import Deployment
from jaxserve.fleet.role_runtime import RoleRuntime, deadlines_of
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.ends import ReceiveAnswer, SendMessage
from jaxserve.link.dispatch.message import answer_format
from jaxserve.link.remote.client import MessageClient
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.roles.attention import AttentionWorker, Cell, Workers
from jaxserve.roles.attention_programs import build_attention
from jaxserve.roles.layout import token_sizes
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.weights import LeafSource
from jaxserve.roles.worker import Observer


class PullEnd:
    """An attention worker's end of a link to another runtime (`link.ends.AttentionEnd`)."""

    def __init__(self, client: MessageClient, contract: Contract):
        self._client, self._contract = client, contract

    def sender(self, layer: int, tokens: int, lane: int) -> SendMessage:
        """Makes the sender for a layer's messages, in steps of `tokens` tokens a DP group."""
        send, kind = self._client.send, self._contract.layers[layer]
        rows = self._contract.piece_rows(tokens)
        return lambda message: send(lane, kind, layer, rows, message)

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        """Makes the receiver of the answers to those messages; it waits for the next one."""
        receive = self._client.receive
        return lambda: (receive(lane),)


def attention_cell(
    role: RoleRuntime,
    deployment: Deployment,
    source: LeafSource,
    token: str,
    observer: Observer | None = None,
) -> tuple[Cell, MessageClient]:
    """Loads, compiles and connects the attention worker of this runtime.

    Raises:
      ConfigError: every ffn worker refuses this one; names the facts that differ.
      EngineFailedError: no ffn worker came within `link.absent_seconds`.
    """
    answer = answer_format(role.contract)
    templates = AttentionTemplates(role.config, deployment, AbstractSubmeshes(deployment))
    given = role.mesh, source, role.names, role.executables
    built = build_attention(templates, deployment, *given)

    def link(role: RoleRuntime, addresses: Sequence[str]) -> MessageClient:
        return kind(
            addresses,
            role.hello,
            token,
            domain=domain,
            transport=deployment.link.transport,
            mesh=role.mesh,
            answer_piece=lambda _, rows: jax.ShapeDtypeStruct((rows, answer.width), answer.dtype),
            rows=[role.contract.piece_rows(tokens) for tokens in token_sizes(deployment)],
            processes=max(1, deployment.ffn.processes),
            deadlines=deadlines_of(deployment),
        )

    domain, end, kind = _domain_name(role), PullEnd, MessageClient
    if deployment.ffn.instances > 1:  # which few processes need
        links, end, kind = pkgutil.resolve_name("jaxserve.fleet.shard_links:OF_SHARDS")
        client = links(role, link)
    else:
        client = link(role, deployment.link.addresses)
    client.connect()
    worker = AttentionWorker(*built, end(client, role.contract))
    rotation = Rotation(role.config.layers, deployment.lanes, gated=True)
    workers, predicts = Workers(attention=(worker,)), bool(role.config.modules)
    return Cell(workers, rotation, deployment.lanes, observer, predicts=predicts), client


def _domain_name(role: RoleRuntime) -> str:
    """Returns a name that all processes of this worker share, and no other worker or start has."""
    number = multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32)))
    return f"{role.role} {int(number):08x}"

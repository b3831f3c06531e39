"""The programs of the ffn role: one a kind of layer and size of a step (design, decisions 1 and 6).

A message arrives as pieces, one a slot of a device; what the devices that no piece reaches hold is
padding. The exchange brings the rows to the devices that need them and the results back to where
the rows came from.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFNKind
from jaxserve.link.contract import Contract
from jaxserve.link.message import message_formats
from jaxserve.mesh import FFN_AXES, FFN_RULES
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.ffn.exchange import Axes, Blocks, make_exchanges
from jaxserve.roles.program import Program


class FFNPrograms:
    """What runs on the ffn mesh, for the messages of domains that have one contract.

    Args:
      contract: None: that of the deployment.
    """

    def __init__(
        self,
        templates: ModelTemplates,
        deployment: Deployment,
        mesh: Mesh,
        contract: Contract | None = None,
    ):
        self.templates, self.mesh = templates, mesh
        self.config, self.dtype = templates.config, templates.dtype
        self.contract = contract or Contract.of(templates.config, deployment)
        self.formats = message_formats(self.contract)
        self.route = self.contract.route(mesh.size)
        blocks = Blocks(mesh.size * self.route.slots, self.route.filled)
        axes = Axes(*FFN_AXES, rows=FFN_AXES)
        self.exchanges = make_exchanges(templates.exchange, axes, self.dtype, blocks)

    def ffn(self, tokens: int, kind: FFNKind) -> Program:
        """(pieces of the message, one array a slot…, layer…) → (pieces of the answer…), for steps
        of so many tokens a DP group."""
        layer, slots = self.templates.ffn[kind], self.route.slots
        message, rows = self.formats[kind], self.contract.piece_rows(tokens)
        unpack = functools.partial(message.unpack, dtype=self.dtype)

        def body(*arguments: Array) -> tuple[Array, ...]:
            packed = jnp.concatenate(arguments[:slots])
            answer, _ = self.exchanges[kind](packed, layer.merge(arguments[slots:]), unpack)
            return tuple(jnp.split(answer.astype(self.dtype), slots))

        pieces = PartitionSpec(FFN_AXES)
        shape = jax.ShapeDtypeStruct((self.mesh.size * rows, message.width), message.word)
        return Program(
            f"ffn_{kind}",
            body,
            self.mesh,
            (*[shape] * slots, *layer.leaves),
            (*[pieces] * slots, *layer.specs(FFN_RULES)),
            (pieces,) * slots,
            donated=(),
        )

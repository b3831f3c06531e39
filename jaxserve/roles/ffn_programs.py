"""The programs of the ffn role: one for each kind of layer and size of a step.

A message arrives as pieces, one for each slot of a device; slots without a piece hold padding. The
exchange brings rows to the devices that need them, and results back to the rows' devices.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFNKind
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import PackedRows, answer_format, message_formats
from jaxserve.mesh import FFN_AXES, INSTANCE, AnyMesh, expert_axes, ffn_rules, placed
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.ffn.axes import Axes
from jaxserve.model.ffn.exchange import Blocks, make_exchanges
from jaxserve.roles.expert_programs import BankShape, ExpertPrograms, add_load, move_pieces
from jaxserve.roles.expert_slots import Bank
from jaxserve.roles.program import REPLICATED, Arrays, Program


class FFNPrograms:
    """Programs of the ffn mesh for the messages of domains that share a contract.

    Args:
      contract: shapes of the messages; None takes the deployment's.
    """

    def __init__(
        self,
        templates: ModelTemplates,
        deployment: Deployment,
        mesh: AnyMesh,
        contract: Contract | None = None,
    ):
        self.templates = templates
        self.mesh = cast(Mesh, mesh)  # an abstract one does for shapes
        self.config, self.dtype = templates.config, templates.dtype
        self.contract = contract or Contract.of(templates.config, deployment)
        self.formats, self.answers = message_formats(self.contract), answer_format(self.contract)
        self.route = self.contract.route(mesh.size)
        instances = self.route.instances
        blocks = Blocks(mesh.size // instances * self.route.slots, self.route.filled)
        axes = Axes(*FFN_AXES, rows=FFN_AXES, instance=INSTANCE if instances > 1 else None)
        self.exchanges = make_exchanges(
            templates.exchange, axes, self.dtype, blocks, self.contract.combine
        )
        self.slots = templates.slots
        self.banks = tuple(
            Bank((layer,), self.slots)
            for layer, kind in enumerate(self.contract.layers)
            if kind == "moe"
        )
        self.experts: ExpertPrograms | None = None
        if self.banks:
            self.experts = ExpertPrograms(
                templates.ffn["moe"],
                self.slots,
                self.mesh,
                ffn_rules(mesh),
                expert_axes(mesh),
                stacked=False,
                pieces=move_pieces(templates, deployment.experts),
            )

    def ffn(self, tokens: int, kind: FFNKind) -> Program:
        """(message, table, counts, layer) → (pieces of the answer…, counts), for steps with this
        number of tokens a DP group.

        The message has one array for each slot. Layers without routed experts have neither table
        nor counts.
        """
        layer, slots = self.templates.ffn[kind], self.route.slots
        message, rows = self.formats[kind], self.contract.piece_rows(tokens)
        packing, exchange = PackedRows(message, self.dtype), self.exchanges[kind]
        moe = kind == "moe"

        def body(message: Arrays, tables: Arrays, counts: Arrays, leaves: Arrays) -> Arrays:
            packed, block = jnp.concatenate(message), layer.merge(leaves)
            answer, load = exchange(packed, block, packing, tables[0][0] if tables else None)
            pieces = self.answers.pieces(answer, slots)
            return pieces if load is None else (*pieces, add_load(counts[0], load[None]))

        pieces = PartitionSpec(tuple(self.mesh.shape))
        piece = jax.ShapeDtypeStruct((self.mesh.size * rows, message.width), message.word)
        bank = BankShape(1, self.slots)
        counts = bank.counts_spec(expert_axes(self.mesh))
        tables = placed(self.mesh, [bank.table] * moe, [REPLICATED] * moe)
        return Program(
            f"ffn_{kind}",
            body,
            self.mesh,
            (
                placed(self.mesh, [piece] * slots, [pieces] * slots),
                tables,
                placed(self.mesh, [bank.counts] * moe, [counts] * moe),
                layer.arrays(self.mesh, ffn_rules(self.mesh)),
            ),
            (*[pieces] * slots, *(counts,) * moe),
            donates=(2,),
            cuda_graphs="off",
            ragged=moe and self.templates.exchange == "alltoall",
        )

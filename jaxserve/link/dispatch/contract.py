"""Shapes of a link's messages, which both ends derive from the configuration alone.

Each end computes its own contract; ends of independent runtimes compare facts when they meet
(`link/remote/client.py`). Domains may cut their messages into different numbers of pieces. Plain
Python, without JAX.
"""

from typing import Any, NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.model import FFNKind, ModelConfig


class MessageSize(NamedTuple):
    """Size of a message, which with the kind of its layer fixes what an ffn worker runs."""

    pieces: int
    """Number of pieces: one for each device of the attention mesh."""
    rows: int
    """Rows of one piece, both ways."""
    messages: int = 1
    """Messages, each of these pieces, that an ffn worker runs side by side."""


MOST_MESSAGES = 512
"""Most messages that an ffn worker runs side by side, where its memory allows it."""


def experts_of(experts: int, shards: int, number: int) -> range:
    """Returns the experts of one of several ffn workers that share a model's experts."""
    return range(experts * number // shards, experts * (number + 1) // shards)


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of everything that crosses between an attention worker and an ffn worker.

    Attributes:
      groups: DP groups.
      attention_devices: devices of the attention mesh; a message has as many pieces.
      d_model: values a row.
      top_k: routed experts a row of a MoE layer.
      experts: routed experts of the model, without padding.
      layers: kind of every layer's FFN, those of prediction modules included.
      dispatch: format of rows on their way to the ffn mesh.
      combine: format of rows on their way back.
      instances: ffn instances, each of which gets all messages, or its rows of them, and answers
        with a share.
      messages: messages that the ffn worker runs side by side.
    """

    groups: int
    attention_devices: int
    d_model: int
    top_k: int
    experts: int
    layers: tuple[FFNKind, ...]
    dispatch: FormatName
    combine: FormatName
    instances: int = 1
    messages: int = 1

    @classmethod
    def of(cls, config: ModelConfig, deployment: Deployment) -> "Contract":
        """The contract of a model on a deployment."""
        return cls(
            groups=deployment.attention.dp,
            attention_devices=deployment.attention.devices,
            d_model=config.d_model,
            top_k=config.top_k,
            experts=config.experts,
            layers=tuple(config.layer(layer).ffn.kind for layer in range(config.all_layers)),
            dispatch=deployment.dispatch_format,
            combine=deployment.combine_format,
            instances=deployment.ffn.instances,
        )

    def piece_rows(self, tokens: int) -> int:
        """Rows of one piece, both ways, in a step with this number of tokens a DP group.

        Raises:
          ValueError: the rows cannot be cut into equal pieces.
        """
        rows = self.groups * tokens
        if rows % self.attention_devices:
            raise ValueError(
                f"{rows} rows cannot be cut into {self.attention_devices} equal pieces"
            )
        return rows // self.attention_devices

    def size(self, tokens: int) -> MessageSize:
        """Size of messages in steps with this number of tokens a DP group; see `piece_rows`."""
        return MessageSize(self.attention_devices, self.piece_rows(tokens), self.messages)

    def of_pieces(self, pieces: int, messages: int = 1) -> "Contract":
        """Returns the contract for other domains, which send messages in this number of pieces.
        Only the rows of their pieces are known; they stand for the tokens of a DP group."""
        return msgspec.structs.replace(
            self, groups=pieces, attention_devices=pieces, messages=messages
        )

    def facts(self) -> dict[str, Any]:
        """Values that both ends must agree on, by name: all but the pieces."""
        facts, free = msgspec.to_builtins(self), ("groups", "attention_devices", "messages")
        return {name: facts[name] for name in facts if name not in free}

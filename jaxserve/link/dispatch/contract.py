"""Shapes of a link's messages, which both ends derive from the configuration alone.

Each end computes its own contract; ends of independent runtimes compare facts when they meet
(`link/remote/client.py`). Domains may cut their messages into different numbers of pieces. Plain
Python, without JAX.

A message is one array, cut into equal pieces, one for each attention device, whatever the ffn mesh
is like (design, decision 5). Rows cross once: piece a goes to its *ingress* device of the ffn mesh,
and the result of its rows comes back from there. The ffn mesh itself brings rows to the devices
that need them (`model/ffn/exchange.py`). Where it consists of several instances, which do so each
for itself, rows cross once to each of them: to the same device of all.
"""

import hashlib
import json
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.model import FFNKind, ModelConfig


class Leg(NamedTuple):
    """Pieces that cross in one copy: device `attention[i]` is paired with device `ffn[i]`."""

    slot: int
    """Which of the ffn devices' slots the pieces fill."""
    answer: int
    """Which of the arrays that make up an answer their results are of."""
    attention: tuple[int, ...]
    """Places of attention devices in their mesh, ascending."""
    ffn: tuple[int, ...]
    """Places of ffn devices in theirs, with one instance ascending; no device twice."""


class Route(NamedTuple):
    """The pieces' places, for messages and answers alike."""

    attention: int
    """Attention devices, and so pieces."""
    ffn: int
    """ffn devices."""
    instances: int = 1
    """Equal parts of these. With several the attention devices are a multiple of the ffn devices,
    so that every slot is filled."""

    @property
    def slots(self) -> int:
        """Pieces that an ffn device has room for; a slot that no piece fills holds padding."""
        return self._own * self.instances

    @property
    def _own(self) -> int:
        """Those of the pieces whose ingress it is."""
        return -(-self.attention // self.ffn)

    def ingress(self, piece: int) -> tuple[int, int]:
        """The ffn device of a piece, and its slot there.

        With fewer pieces than devices they are spread evenly; with more, an ffn device holds
        consecutive pieces.
        """
        if self.attention <= self.ffn:
            return piece * self.ffn // self.attention, 0
        return divmod(piece, self._own)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """One copy a slot. A piece reaches the devices after its ingress, an instance further each,
        in later slots."""
        places = [(piece, *self.ingress(piece)) for piece in range(self.attention)]
        part, legs = self.ffn // self.instances, []
        for slot in range(self.slots):
            further, own = divmod(slot, self._own)
            pairs = [
                (piece, (device + further * part) % self.ffn)
                for piece, device, at in places
                if at == own
            ]
            legs.append(Leg(slot, further, *map(tuple, zip(*pairs, strict=True))))
        return tuple(legs)

    @property
    def filled(self) -> tuple[int, ...]:
        """Where the pieces lie among all slots of an instance's devices, device by device."""
        if self.instances > 1:
            return tuple(range(self.slots * self.ffn // self.instances))
        places = map(self.ingress, range(self.attention))
        return tuple(device * self.slots + slot for device, slot in places)


class MessageSize(NamedTuple):
    """Size of a message, which with the kind of its layer fixes what an ffn worker runs."""

    pieces: int
    """Number of pieces: one for each device of the attention mesh."""
    rows: int
    """Rows of one piece, both ways."""


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
      instances: of the ffn mesh, each of which gets all messages and answers with a share.
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
        return MessageSize(self.attention_devices, self.piece_rows(tokens))

    def of_pieces(self, pieces: int) -> "Contract":
        """Returns the contract of another domain, which sends messages in this number of pieces.
        Only the rows of its pieces are known; they stand for the tokens of a DP group."""
        return msgspec.structs.replace(self, groups=pieces, attention_devices=pieces)

    def route(self, ffn_devices: int) -> Route:
        """Returns the route of the pieces on an ffn mesh with this number of devices."""
        return Route(self.attention_devices, ffn_devices, self.instances)

    def facts(self) -> dict[str, Any]:
        """Values that both ends must agree on, by name: all but the pieces."""
        facts = msgspec.to_builtins(self)
        return {name: facts[name] for name in facts if name not in ("groups", "attention_devices")}

    def digest(self) -> str:
        """Digest of the facts: equal if and only if the facts are."""
        text = json.dumps(self.facts(), sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()

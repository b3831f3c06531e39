"""Where the pieces of a link's messages land on the ffn mesh. Plain Python, without JAX.

A message is one array, cut into equal pieces, one for each attention device, for any ffn mesh.
Rows cross once: piece a goes to its *ingress* device of the ffn mesh, and the result of its rows
comes back from there. The ffn mesh itself brings rows to the devices that need them
(`model/ffn/exchange.py`). Each of several instances brings rows to its own devices; rows then cross
once to each instance, always to the same device of it.
"""

from typing import NamedTuple

from jaxserve.link.dispatch.contract import Contract


class Leg(NamedTuple):
    """Pieces that cross in one copy: device `attention[i]` is paired with device `ffn[i]`."""

    slot: int
    """Slot of the ffn devices that the pieces fill."""
    answer: int
    """Index of the array, among those that make up an answer, that holds the pieces' results."""
    attention: tuple[int, ...]
    """Indices of attention devices in their mesh, ascending."""
    ffn: tuple[int, ...]
    """Indices of ffn devices in their mesh, no device twice; ascending if there is one instance."""


class Route(NamedTuple):
    """Paths of all pieces between the attention and ffn meshes, for messages and answers alike."""

    attention: int
    """Number of attention devices, and so of pieces."""
    ffn: int
    """Number of ffn devices."""
    instances: int = 1
    """Equal parts of the ffn devices. With several, the attention devices are a multiple of the ffn
    devices, so that every slot is filled."""
    messages: int = 1
    """Messages side by side: each takes the next slots of every device. Only if `instances` is 1;
    pieces and legs are those of a single message."""

    @classmethod
    def of(cls, contract: Contract, ffn_devices: int) -> "Route":
        """Returns the route on an ffn mesh with this number of devices."""
        return cls(contract.attention_devices, ffn_devices, contract.instances, contract.messages)

    @property
    def slots(self) -> int:
        """Pieces that an ffn device has room for; a slot that no piece fills holds padding."""
        return self._own * self.instances * self.messages

    @property
    def _own(self) -> int:
        """Most pieces that have the same ffn device as their ingress."""
        return -(-self.attention // self.ffn)

    def ingress(self, piece: int) -> tuple[int, int]:
        """Returns the ingress device of a piece, and its slot there.

        If pieces are fewer than devices, they are spread evenly; otherwise an ffn device holds
        consecutive pieces.
        """
        if self.attention <= self.ffn:
            return piece * self.ffn // self.attention, 0
        return divmod(piece, self._own)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Copies of all pieces to the ffn mesh, one a slot; later slots serve further instances."""
        places = [(piece, *self.ingress(piece)) for piece in range(self.attention)]
        part, legs = self.ffn // self.instances, []
        for slot in range(self._own * self.instances):
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
        """Places of the pieces among all slots of an instance's devices, device by device."""
        if self.instances > 1:
            return tuple(range(self.slots * self.ffn // self.instances))
        places = [self.ingress(piece) for piece in range(self.attention)]
        return tuple(
            sorted(
                device * self.slots + message * self._own + slot
                for device, slot in places
                for message in range(self.messages)
            )
        )

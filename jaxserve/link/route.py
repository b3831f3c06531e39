"""Which piece of a message lies on which device of the ffn mesh: pure data, no JAX.

A message is one array, cut into equal pieces, one for each attention device, whatever the ffn mesh
is like (design, decision 5). Rows cross once: piece a goes to its *ingress* device of the ffn mesh,
and the result of its rows comes back from there. The ffn mesh itself brings rows to the devices
that need them (`model/ffn/exchange.py`).
"""

from typing import NamedTuple


class Leg(NamedTuple):
    """Pieces that cross in one copy: device `attention[i]` is paired with device `ffn[i]`."""

    slot: int
    """Which of the ffn devices' slots the pieces fill."""
    attention: tuple[int, ...]
    """Places of attention devices in their mesh, ascending."""
    ffn: tuple[int, ...]
    """Places of ffn devices in theirs, ascending; no device twice."""


class Route(NamedTuple):
    """The pieces' places, for messages and answers alike."""

    attention: int
    """Attention devices, and so pieces."""
    ffn: int
    """ffn devices."""

    @property
    def slots(self) -> int:
        """Pieces that an ffn device has room for; a slot that no piece fills holds padding."""
        return -(-self.attention // self.ffn)

    def ingress(self, piece: int) -> tuple[int, int]:
        """The ffn device of a piece, and its slot there.

        With fewer pieces than devices they are spread evenly; with more, an ffn device holds
        consecutive pieces.
        """
        if self.attention <= self.ffn:
            return piece * self.ffn // self.attention, 0
        return divmod(piece, self.slots)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """One copy a slot."""
        places = [(piece, *self.ingress(piece)) for piece in range(self.attention)]
        legs = []
        for slot in range(self.slots):
            pairs = [(piece, device) for piece, device, at in places if at == slot]
            legs.append(Leg(slot, *map(tuple, zip(*pairs, strict=True))))
        return tuple(legs)

    @property
    def filled(self) -> tuple[int, ...]:
        """Where the pieces lie among all slots of all ffn devices, device by device."""
        places = map(self.ingress, range(self.attention))
        return tuple(device * self.slots + slot for device, slot in places)

"""Messages of a weights link.

A part of an array passes behind the frame that announces it, row by row, in the array's own number
format. Arrays are named as the checkpoint's blocks and leaves are, and parts of them are given in
coordinates of the whole array without padding, so that neither end knows how the other one has cut
or placed it. Plain Python; knows nothing of JAX.

    starting → running   Join      Read*
    running → starting   Welcome   (Ready bytes | Failed)*               or Refused
"""

import msgspec

from jaxserve.link.session.messages import Greeting

MAX_FRAME_BYTES = 64 << 20
"""Largest frame: a welcome names every array of a model."""

Ranges = tuple[tuple[int, int], ...]
"""(start, stop) along every axis."""


class HeldArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that a worker can hand out.

    Attributes:
      shape: of the whole array, without padding.
      dtype: its name in NumPy and `ml_dtypes`.
      apart: whether entries of the first axis lie apart (experts in slots): each is read by itself.
    """

    shape: tuple[int, ...]
    dtype: str
    apart: bool = False


Held = dict[str, dict[str, HeldArray]]
"""Arrays by block and leaf."""


class Welcome(Greeting, frozen=True, tag="welcome"):
    """The running worker gives them."""

    held: Held


class Read(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """Asks for a part of an array."""

    number: int
    """Names the read on this connection."""
    block: str
    leaf: str
    ranges: Ranges

"""The end of a starting worker of a weights channel: one running worker, asked for parts of arrays.

A part is cut into pieces, of which some are asked for ahead, and lands where its target lies: in
the memory that XLA adopts on CPUs. Called by `checkpoint/peer.py`, by one thread at a time. Knows
neither models nor meshes.
"""

import math
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from jaxserve.link.session.channel import DEFAULT_DEADLINES, AuthenticationError, dial
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Hello, Refusal
from jaxserve.link.session.messages import Bulk, Failed, Join, Ready, Refused, decoder, encode
from jaxserve.link.weights import frames

PIECE_BYTES = 4 << 20
ASKED_AHEAD = 4
"""Pieces that are asked for at a time: while one lands, the other end reads the next ones."""


SILENT_SECONDS = 10.0
"""How long a piece may take: the other end keeps a rate, and may have to wait for a step."""


_decoder = decoder(frames.Welcome, Refused, Ready, Failed)


class PeerError(Exception):
    """A running worker does not give its weights: it is gone, silent, or another one's."""


class WeightsPeer:
    """Connection to a running worker, with the arrays that it holds.

    Raises:
      PeerError: no worker listens there, or one of another model; says why.
    """

    def __init__(self, address: str, hello: Hello, token: str):
        self.address = address
        self._number = 0
        join, seconds = Join(hello), DEFAULT_DEADLINES.handshake
        try:
            self._channel = dial(address, token, seconds, frames.MAX_FRAME_BYTES)
            welcome = greet(self._channel, join, frames.Welcome, _decoder.decode, seconds)
        except (AuthenticationError, EOFError, OSError, Refusal, msgspec.DecodeError) as error:
            raise PeerError(f"{address}: {error or 'end of file'}") from None
        self.worker, self.held = welcome.hello.worker, welcome.held

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def read(self, block: str, leaf: str, ranges: frames.Ranges, target: np.ndarray) -> int:
        """Reads a part of an array into a target of its size and number format; returns its bytes.

        Raises:
          PeerError: it does not come; nothing else will.
        """
        waiting = pieces(self.held[block][leaf], ranges, target.dtype.itemsize)
        asked: deque[tuple[int, frames.Ranges]] = deque()
        try:
            while True:
                while len(asked) < ASKED_AHEAD and (piece := next(waiting, None)) is not None:
                    self._number += 1
                    self._channel.send(encode(frames.Read(self._number, block, leaf, piece)))
                    asked.append((self._number, piece))
                if not asked:
                    return target.nbytes
                number, piece = asked.popleft()
                spans = zip(piece, ranges, strict=True)
                place = tuple(slice(a - low, b - low) for (a, b), (low, _) in spans)
                self._land(number, target[place])
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise PeerError(f"{self.address}: {error or 'the connection closed'}") from None

    def _land(self, number: int, target: np.ndarray) -> None:
        if not self._channel.wait(SILENT_SECONDS):
            raise PeerError(f"{self.address}: silent for {SILENT_SECONDS:g} s")
        wanted = Ready(number, Bulk(target.nbytes, None))
        match _decoder.decode(self._channel.receive()):
            case Ready() as ready if ready == wanted:
                whole = target if target.flags.c_contiguous else np.empty_like(target, order="C")
                bytes_of = whole.reshape(-1).view(np.uint8)
                self._channel.receive_into(memoryview(bytes_of), SILENT_SECONDS)
                if whole is not target:
                    target[...] = whole
            case Failed(text=text):
                raise PeerError(f"{self.address}: {text}")
            case frame:
                raise PeerError(f"{self.address}: unexpected {frame}"[:500])


def pieces(array: frames.HeldArray, ranges: frames.Ranges, item: int) -> Iterator[frames.Ranges]:
    """Cuts a part into pieces of `PIECE_BYTES` at most, each row by row the next of the part.

    Args:
      item: bytes of an element.
    """
    if array.apart and ranges[0][1] - ranges[0][0] > 1:
        for entry in range(*ranges[0]):
            yield from pieces(array, ((entry, entry + 1), *ranges[1:]), item)
        return
    sizes = [stop - start for start, stop in ranges]
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), None)
    if math.prod(sizes) * item <= PIECE_BYTES or axis is None:
        if all(sizes):
            yield ranges
        return
    start, stop = ranges[axis]
    step = max(1, PIECE_BYTES // (math.prod(sizes[axis + 1 :]) * item))
    for first in range(start, stop, step):
        part = first, min(first + step, stop)
        yield from pieces(array, (*ranges[:axis], part, *ranges[axis + 1 :]), item)

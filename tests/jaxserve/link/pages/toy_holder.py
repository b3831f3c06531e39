"""A pages server over a toy holder: token i of every lease holds the number i, in two arrays.

Run as a process it prints its address and epoch, and lives until it is killed.
"""

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxserve.link.pages.frames import CACHE_FORMAT, Fetch, PagesError, Piece, pages_digest
from jaxserve.link.pages.server import PagesServer
from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.channel import Deadlines
from jaxserve.link.session.hello import facts_digest, make_hello

FACTS = {"model": "toy"}
PIECES = (4, 16)
WIDTH = 8
DEADLINES = Deadlines(handshake=10.0, probe=0.2, down=2.0, answer=3.0)
SECRET = "secret"
TOKEN_BYTES = 4 + 4 * WIDTH


class ToyHolder:
    """Answers at once, but for the leases `slow` (when `go` is set) and `gone`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.renewed: list[str] = []
        self.released: list[str] = []

    def export(self, fetch: Fetch, reply: "Future[Piece]") -> None:
        if fetch.hand_off == "gone":
            reply.set_exception(PagesError("it is over"))
            return

        def answer() -> None:
            if fetch.hand_off == "slow":
                self.go.wait(30)
            numbers = np.arange(fetch.start, fetch.start + fetch.size, dtype=np.int32)
            wide = np.repeat(numbers[:, None], WIDTH, axis=1)
            reply.set_result([jax.device_put(numbers), jax.device_put(wide)])

        threading.Thread(target=answer, daemon=True).start()

    def renew(self, hand_offs: Sequence[str]) -> None:
        self.renewed += hand_offs

    def release_hand_off(self, hand_off: str) -> None:
        self.released.append(hand_off)


class ToyLanding:
    """Where they arrive."""

    pieces, closes = PIECES, False

    def landing(self, group: int, tokens: int, cache_format: str) -> list[jax.ShapeDtypeStruct]:
        sharding = SingleDeviceSharding(jax.devices()[0])
        return [
            jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
            for shape in ((tokens,), (tokens, WIDTH))
        ]


def toy_server(holder: ToyHolder, **options) -> PagesServer:
    """A started server."""
    arguments = {"deadlines": DEADLINES} | options
    formats = {CACHE_FORMAT: (arguments.pop("cache_format", "int32"), ["int32", "fp8"])}
    server = PagesServer(
        "127.0.0.1:0",
        make_hello("prefill", arguments.pop("facts", FACTS), formats=formats),
        SECRET,
        holder,
        token_bytes=TOKEN_BYTES,
        **arguments,
    )
    server.start()
    return server


def toy_source(address: str, epoch: int, hand_off: str, tokens: int) -> PagesSource:
    """Pages of the prompt 0, 1, 2, …"""
    digest = pages_digest(range(tokens), facts_digest(FACTS), "int32")
    return PagesSource(address, hand_off, tokens, digest, epoch)


if __name__ == "__main__":
    held = toy_server(ToyHolder())
    print(held.address, held.epoch, flush=True)
    sys.stdin.read()

"""The work of a message server: its interface, and compilation for domains that join.

A domain says when it joins in how many pieces its messages come, and of how many rows
(`frames.Join`). An ffn worker has compiled for the attention mesh of its own deployment file before
it listens. Programs that another domain needs, and those for messages of several domains side by
side, it compiles when that domain first asks to join. It does so on a thread beside the running
ones, while the domain is told to come back. Used by `server.py`; knows nothing of ffn.
"""

import functools
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.ends import Arrays, piece_sharding
from jaxserve.link.dispatch.put import fast_put
from jaxserve.link.dispatch.route import Route
from jaxserve.link.remote.passes import Passes
from jaxserve.link.session.hello import Refusal

logger = logging.getLogger(__name__)

MOST_SIZES = 128
"""Most message sizes that domains ask for. Each needs a program for every kind of layer."""


class Work(Protocol):
    """Interface of an ffn worker to its message server."""

    def ready(self, sizes: Sequence[MessageSize]) -> bool:
        """Returns whether messages of these sizes can be run without compiling anything."""

    def compile(self, sizes: Sequence[MessageSize]) -> None:
        """Compiles for these sizes, beside `run`, on another thread. Raises where that fails."""

    def warm_up(self, sizes: Sequence[MessageSize]) -> None:
        """Runs each once; never beside `run`."""

    def shapes(self, kind: str, size: MessageSize) -> Sequence[jax.ShapeDtypeStruct]:
        """Returns the shapes of a message's pieces. Raises for a kind that this worker lacks."""

    def padding(self, kind: str) -> np.ndarray:
        """Returns a row that this worker does not compute."""

    def holders(self, pieces: int) -> Sequence[int]:
        """Returns the process of this worker at which each of a message's pieces lands."""

    def land(self, kind: str, size: MessageSize, pieces: Sequence[np.ndarray]) -> Arrays:
        """Puts those of a message's pieces that land at this process, in their order, on its
        devices, whose memory adopts theirs if it can."""

    def run(
        self, kind: str, layer: int, size: MessageSize, messages: Sequence[Arrays]
    ) -> Sequence[Sequence[jax.Array]]:
        """Enqueues one pass over messages that have landed, each of this size, and returns their
        answers: one array for each piece that has landed here. Raises for a kind or layer that this
        worker does not have."""


def sizes_together(sizes: Iterable[MessageSize], together: int) -> tuple[MessageSize, ...]:
    """Returns the sizes of passes of up to `together` messages: powers of two side by side."""
    counts = [1 << power for power in range((together - 1).bit_length() + 1)]
    return tuple(size._replace(messages=count) for size in sizes for count in counts)


class Preparations:
    """Compilations for domains that ask to join.

    Args:
      several: this worker has several processes, which compile and warm up together as they start,
        and for no other messages later.
    """

    def __init__(self, work: Work, passes: Passes, *, several: bool = False):
        self._work, self._passes, self._several = work, passes, several
        self._lock = threading.Lock()
        self._threads: dict[tuple[MessageSize, ...], threading.Thread] = {}
        self._failed: dict[tuple[MessageSize, ...], str] = {}

    def ask(self, pieces: int, rows: Sequence[int], together: int = 1) -> None:
        """Returns if a domain with such messages can be served, and up to `together` of them in one
        pass.

        A failure is told once. The next domain that asks has it tried again: the cause may have
        been a full disk or device.

        Raises:
          Refusal: it cannot; `later` if this begins to compile for it.
        """
        if pieces < 1 or not rows or min(rows) < 1:
            raise Refusal(f"messages of {pieces} pieces of {list(rows)} rows")
        sizes = sizes_together((MessageSize(pieces, row) for row in sorted(set(rows))), together)
        what = f"{pieces} pieces of {', '.join(map(str, sorted(set(rows))))} rows"
        with self._lock:
            if reason := self._failed.pop(sizes, ""):
                raise Refusal(f"no programs for messages of {what}: {reason}")
            thread = self._threads.get(sizes)
            if thread is None or not thread.is_alive():
                if self._work.ready(sizes):
                    return
                if self._several:
                    raise Refusal(
                        f"messages of {what}: an ffn worker of several processes serves the sizes "
                        "of its own deployment file alone"
                    )
                if len({*sizes}.union(*self._threads)) > MOST_SIZES:
                    raise Refusal(f"{what}: more than {MOST_SIZES} sizes of messages")
                logger.info("link: compiles for messages of %s", what)
                thread = threading.Thread(
                    target=self._prepare, args=(sizes,), name="link compile", daemon=True
                )
                self._threads[sizes] = thread
                thread.start()
        raise Refusal(f"compiles for messages of {what}", later=True)

    def _prepare(self, sizes: tuple[MessageSize, ...]) -> None:
        new, held = [size for size in sizes if not self._work.ready([size])], 0.0
        try:
            self._work.compile(new)
            for size in new:  # the other domains wait for one at a time
                warm_up = functools.partial(self._work.warm_up, [size])
                held = max(held, self._passes.between(warm_up))
            logger.info("link: ready for %d sizes; passes waited %.3g s at most", len(new), held)
        except Exception as error:
            logger.exception("link: not ready for messages of %s", sizes)
            with self._lock:
                self._failed[sizes] = f"{type(error).__name__}: {error}"
                del self._threads[sizes]


class MessageLanding:
    """Places where messages of any size land on an ffn mesh, and from which their answers leave.

    Programs take one array a slot over the whole mesh, in which devices without a piece hold
    padding. Inside one runtime the transports do the same.
    """

    def __init__(self, route: Route, mesh: Mesh):
        self._mesh, self._sharding = mesh, piece_sharding(mesh)
        devices, here = list(mesh.devices.flat), jax.process_index()
        places = [route.ingress(piece) for piece in range(route.attention)]
        self.holders = [devices[device].process_index for device, _ in places]
        """Process at which each piece lands."""
        local = [at for at, device in enumerate(devices) if device.process_index == here]
        self._places = [(local.index(at), slot) for at, slot in places if at in local]
        """Device, among those of this process, and slot of each piece that lands here."""
        pieces = {place: piece for piece, place in enumerate(self._places)}
        self._slots = [
            [pieces.get((device, slot)) for device in range(len(local))]
            for slot in range(route.slots)
        ]
        """Piece that lands in each slot of each device, or None: [slot][device]."""
        self._padding = functools.cache(self._make_padding)
        self._put = functools.cache(
            lambda piece, dtype: fast_put()((mesh.size * piece[0], piece[1]), dtype, self._sharding)
        )

    def land(self, pieces: Sequence[np.ndarray], piece: tuple[int, int], dtype: np.dtype) -> Arrays:
        """Puts pieces [rows, words] on the devices, as the arrays that programs take.

        Args:
          pieces: those that land at this process.
          piece, dtype: shape and dtype of each.
        """
        put, padding = self._put(piece, dtype), self._padding(piece, dtype)
        return [
            put([padding[at] if one is None else pieces[one] for at, one in enumerate(slot)])
            for slot in self._slots
        ]

    def pieces(self, slots: Arrays) -> list[jax.Array]:
        """Takes the answers to this process's pieces out of the arrays that a program returned."""
        shards = [array.addressable_shards for array in slots]
        return [shards[slot][device].data for device, slot in self._places]

    def _make_padding(self, piece: tuple[int, int], dtype: np.dtype) -> list[jax.Array]:
        """Makes a piece of zeros on every device of this process."""
        zeros = np.zeros(piece, dtype)
        return [jax.device_put(zeros, device) for device in self._mesh.local_devices]

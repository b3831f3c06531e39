"""The link between an attention worker and an ffn worker of one runtime, with its two ends.

`fleet/assembly.py` makes one for a deployment, and gives each worker its end (`ends.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from jaxserve.config.topology import TRANSPORTS
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.ends import Arrays, ReceiveAnswer, SendMessage
from jaxserve.link.dispatch.mesh_transport import MeshTransport
from jaxserve.link.dispatch.message import answer_format, message_formats
from jaxserve.link.dispatch.route import Route
from jaxserve.link.transports import opens


class RuntimeLink:
    """Both directions, for every kind of layer and size of a step.

    Args:
      transport: name of a transport inside a runtime, or `auto`.

    Attributes:
      attention, ffn: the two ends.
      combine: transports of answers, by the size of a step.
    """

    def __init__(
        self,
        transport: str,
        contract: Contract,
        attention: Mesh,
        ffn: Mesh,
        token_sizes: Sequence[int],
    ):
        cls = opens(_default(attention, ffn) if transport == "auto" else transport)
        route, answer = Route.of(contract, ffn.size), answer_format(contract)
        dispatch: dict[tuple[str, int], MeshTransport] = {}
        combine: dict[int, MeshTransport] = {}
        for tokens in token_sizes:
            rows = contract.piece_rows(tokens)
            for kind, message in message_formats(contract).items():
                piece = rows, message.width
                dispatch[kind, tokens] = cls("dispatch", route, attention, ffn, piece, message.word)
            piece = rows, answer.width
            combine[tokens] = cls("combine", route, attention, ffn, piece, answer.dtype)
        self._layers, self._dispatch, self.combine = contract.layers, dispatch, combine
        self.attention, self.ffn = _AttentionEnd(self), _FFNEnd(self)

    def dispatch(self, layer: int, tokens: int) -> MeshTransport:
        """Returns the transport of a layer's messages in steps of this size."""
        return self._dispatch[self._layers[layer], tokens]

    def clear(self) -> None:
        """Drops everything on the way."""
        for transport in (*self._dispatch.values(), *self.combine.values()):
            transport.clear()


def _default(attention: Mesh, ffn: Mesh) -> str:
    """Returns the transport that `link.transport: auto` takes between these meshes."""
    devices = [*attention.devices.flat, *ffn.devices.flat]
    between_hosts = len({device.process_index for device in devices}) > 1
    ends = "TPU hosts" if between_hosts and devices[0].platform == "tpu" else "devices"
    return next(name for name, one in TRANSPORTS.items() if one.automatic == ends)


class _AttentionEnd(NamedTuple):
    link: RuntimeLink

    def sender(self, layer: int, tokens: int, lane: int) -> SendMessage:
        return self.link.dispatch(layer, tokens).sender()

    def receiver(self, layer: int, tokens: int, lane: int) -> ReceiveAnswer:
        return self.link.combine[tokens].receiver()


class _FFNEnd(NamedTuple):
    link: RuntimeLink

    def receiver(self, layer: int, tokens: int) -> Callable[[], Arrays]:
        return self.link.dispatch(layer, tokens).receiver()

    def sender(self, tokens: int) -> Callable[..., object]:
        return self.link.combine[tokens].sender()

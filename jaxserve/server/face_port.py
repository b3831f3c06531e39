"""The engine's end of the connections to the faces of its host.

Faces are routers with one worker. What they need beyond that: one set of request ids, word of which
requests are admitted, and aborts of each other's requests.
"""

from typing import ClassVar

from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet.request_frames import check_unused
from jaxserve.fleet.worker_port import RouterConnection, WorkerPort
from jaxserve.link.session.channel import Channel
from jaxserve.server.face import Abort, Aborted, Admitted


class FacePort(WorkerPort):
    """Listens for faces.

    Attributes:
      live: which face has a request, by the id that the request's client knows.
    """

    live: "dict[str, FaceConnection]"

    def start(self) -> dict[str, str]:
        """See `WorkerPort`."""
        self.live = {}
        return super().start()

    def connected(self, pid: int) -> bool:
        """Whether the face in a process is connected."""
        return any(face.name.endswith(f"pid {pid})") for face in list(self._routers))

    def abort(self, request_id: str) -> bool:
        """Has a face end its request; returns whether one has it."""
        face = self.live.get(request_id)
        if face is not None:
            face.post(Abort(request_id))
        return face is not None

    def _connection(self, channel: Channel) -> "FaceConnection":
        return FaceConnection(self, channel)


class FaceConnection(RouterConnection):
    """One face's requests, and the way of their outputs to it."""

    _port: FacePort

    def _run(self, deadline: float | None, frame: frames.Submit) -> None:
        check_unused(name := _name(frame.request_id), self._port.live)
        self._port.live[name] = self
        super()._run(deadline, frame)
        self.post(Admitted(frame.request_id))

    def _adopt(self, frame: frames.Adopt) -> None:
        self._port.live[_name(frame.request_id)] = self
        super()._adopt(frame)
        self.post(Admitted(frame.request_id))

    def _ended(self, attempt: str) -> None:
        super()._ended(attempt)
        if self._port.live.get(_name(attempt)) is self:
            del self._port.live[_name(attempt)]

    def _abort(self, frame: Abort) -> None:
        self.post(Aborted(frame.request_id, self._port.abort(frame.request_id)))

    handlers: ClassVar = RouterConnection.handlers | {frames.Adopt: _adopt, Abort: _abort}


def _name(attempt: str) -> str:
    """The id that a request's client knows."""
    return attempt.rpartition("@")[0]

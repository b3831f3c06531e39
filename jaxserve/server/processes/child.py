"""A face's process: `python -m jaxserve.server.processes.child FD`, started by `host.py`.

It serves gRPC and HTTP on ports that it shares with its siblings, and has its tokens from the
engine's process, at the other end of the socket FD. It ends when that one says so or is gone;
signals are the engine's process's to answer.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from jaxserve import logs
from jaxserve.errors import JaxserveError
from jaxserve.link.session.channel import Channel
from jaxserve.server.faces import LocalFaces
from jaxserve.server.processes import frames
from jaxserve.server.processes.remote import RemoteEngine, RemoteGenerator

MESSAGES_A_SECOND = 8000
"""Here they take no time from the step loop."""


def main(descriptor: int) -> int:
    """Serves until the engine's process says that it is over; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    channel = frames.channel_over(socket.socket(fileno=descriptor))
    start = _next_frame(channel)
    if start is None:
        return 1
    assert isinstance(start, frames.Start)
    logs.configure(start.log_format)
    try:
        faces = LocalFaces(
            start.model,
            start.server,
            start.insecure_bind,
            share_ports=True,
            messages_a_second=MESSAGES_A_SECOND,
        )
        channel.send(frames.encode(frames.Started(faces.start())))
    except JaxserveError as error:
        channel.send(frames.encode(frames.Failed(frames.Refusal.of(error))))
        return 1
    grace = _serve(channel, faces, Path(start.metrics_folder))
    if grace is None:
        os._exit(1)  # without the engine's process no request can be completed
    faces.stop(grace)
    return 0


def _serve(channel: Channel, faces: LocalFaces, metrics_folder: Path) -> float | None:
    """Handles frames until `Stop`; returns its grace, or None if the connection was lost."""
    engine: RemoteEngine | None = None
    while (frame := _next_frame(channel)) is not None:
        match frame:
            case frames.Open(info=info):
                engine = RemoteEngine(channel, info)
                faces.open(engine, RemoteGenerator, metrics_folder)
                channel.send(frames.encode(frames.Opened()))
            case frames.Refuse():
                faces.refuse()
            case frames.Abort(request_id=request_id):
                faces.requests.abort(request_id)
            case frames.Stop(grace=grace):
                return grace
            case _ if engine is not None:
                engine.handle(frame)
    return None


def _next_frame(channel: Channel) -> object | None:
    """Returns the next frame; None when the engine's process is gone."""
    try:
        return frames.decode_to_face(channel.receive())
    except (EOFError, OSError):
        return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""Messages between an engine and the faces of its host, beside those of routers and workers.

    face → engine   Abort
    engine → face   (Admitted | Abort | Aborted)

Frames are those of `worker_frames.py`; `face.py` and `face_port.py` are the two ends.
"""

from jaxserve.fleet.request_frames import Frame


class Admitted(Frame):
    """Tells a face that its request is accepted; the alternative is `Rejected`."""

    request_id: str


class Abort(Frame):
    """Ends a request for a caller other than its client: of another face, answered by `Aborted`; or
    of the face that gets this."""

    request_id: str


class Aborted(Frame):
    """Says whether any face has the request that was to be aborted."""

    request_id: str
    found: bool

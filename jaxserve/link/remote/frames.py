"""Messages of a link between runtimes.

The rows of a layer follow the `Note` that announces them, and those of its answer the `Ready`.

    attention → ffn   Join     (Note rows | Echo | Question)*
    ffn → attention   Welcome  (Ready rows | Failed | Echo | Answer)*     or Refused
"""

import msgspec

from jaxserve.link.session.messages import Bulk, Greeting


class Join(Greeting, frozen=True, tag="join"):
    """First frame of a process of an attention worker."""

    domain: str
    """Name of the attention worker, equal in all of its processes and in no other worker."""
    pieces: int = 1
    """Pieces of each message, those of all processes together."""
    rows: tuple[int, ...] = ()
    """All numbers of rows that a piece may have."""
    own: tuple[int, ...] = (0,)
    """Numbers of the pieces that this process sends; none: the connection carries nothing, and ends
    as soon as the ffn process dies (`session/readers.py`)."""


class Welcome(Greeting, frozen=True, tag="welcome"):
    """Accepts a process of an attention worker."""

    places: tuple[int, ...] = ()
    """Numbers of its pieces that land at the ffn process. Only their rows cross the connection."""


class Note(msgspec.Struct, frozen=True, tag="note", array_like=True):
    """Announces a message.

    `rows` are the rows of a piece. With `kind` and the number of pieces they fix the shapes of
    message and answer. No cohort and no deadline are named: a cohort is the lanes of one number,
    and the pool learns from arrivals when a message is due (`cohorts.py`).
    """

    number: int
    """Number of the message, equal in all processes of the attention worker."""
    lane: int
    kind: str
    layer: int
    rows: int
    bulk: Bulk


class Question(msgspec.Struct, frozen=True, tag="question", array_like=True):
    """Question to the runtime behind the link, which alone knows its meaning."""

    number: int
    data: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """Answer to the question with this number."""

    number: int
    data: bytes = b""
    failed: str = ""
    """Reason for the lack of an answer; empty: `data` is the answer."""


class NamedMessage(msgspec.Struct, frozen=True, tag="message", array_like=True):
    """Names a message between processes of an ffn worker. A follower reports that all rows that
    land at it have arrived; the leader orders the messages that all processes run next."""

    domain: str
    pieces: int
    number: int
    lane: int
    kind: str
    layer: int
    rows: int

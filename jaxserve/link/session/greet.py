"""The first frames of a session, as the end that dialled sees them."""

import time
from collections.abc import Callable
from typing import Any

from jaxserve.link.session.channel import Channel, closed_on_error, cut_off
from jaxserve.link.session.messages import Greeting, encode, greeted


def greet[G: Greeting](
    channel: Channel,
    greeting: Greeting,
    kind: type[G],
    decode: Callable[[bytes], Any],
    seconds: float,
) -> G:
    """Introduces this end, which dialled, and returns the introduction of the other one. Closes the
    channel where it fails.

    Raises:
      Refusal: the two ends do not fit.
      OSError, EOFError, msgspec.DecodeError: the connection is lost.
    """
    begin = time.monotonic()
    with closed_on_error(channel), cut_off(channel.shutdown, seconds):
        try:
            channel.send(encode(greeting))
            frame = decode(channel.receive())
        except (EOFError, OSError):
            if time.monotonic() - begin < seconds:
                raise
            raise OSError("the handshake took too long") from None
        return greeted(frame, kind, greeting.hello)

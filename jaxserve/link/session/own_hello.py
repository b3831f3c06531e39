"""The hello of this process, for builders of workers. Plain Python."""

import hashlib
import os
import socket
from collections.abc import Mapping

from jaxserve.link.session.hello import Hello


def make_hello(role: str, facts: Mapping[str, str], *, versions: Mapping[str, str] = {}) -> Hello:
    """The hello of this process as a worker of `role`."""
    return Hello(
        worker=f"{role} (host {socket.gethostname()}, pid {os.getpid()})",
        facts=dict(facts),
        digest=facts_digest(facts),
        versions=dict(versions),
    )


def facts_digest(facts: Mapping[str, str]) -> str:
    """Sixteen hexadecimal digits; the order of the keys does not matter."""
    lines = sorted(f"{key}={value!r}" for key, value in facts.items())
    return hashlib.blake2s("\n".join(lines).encode(), digest_size=8).hexdigest()

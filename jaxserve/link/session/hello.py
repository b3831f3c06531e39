"""Introductions of the two ends of a link, and the comparison that refuses a wrong one.

An attention runtime and an ffn runtime are started apart, perhaps from different files: nothing but
this comparison keeps an ffn worker of another model from answering with numbers that look like any
others. Used by both ends of every session; the builder of a worker makes its hello with the facts.
Plain Python; knows nothing of models and meshes beyond the names in `facts`.
"""

import hashlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

PROTOCOL = 9
"""Raised whenever a message of a session changes its meaning."""

SHOWN_DIFFERENCES = 4


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Introduction of one end; `protocol` and `facts` must be equal at both.

    Attributes:
      worker: name for people: role with its versions, host and process id.
      facts: values that both ends must agree on (model, formats, layers, …), one dotted key a
        value, so that a difference can be named.
      formats: by the key that configures them, the number format that this end is configured for
        (empty: that of the other end) and those that its devices and its JAX compute. Both ends
        must compute what either is configured for.
      protocol: of the frames.
    """

    worker: str
    facts: dict[str, str]
    formats: dict[str, tuple[str, list[str]]] = {}
    protocol: int = PROTOCOL


def make_hello(role: str, facts: Mapping[str, str], **fields: Any) -> Hello:
    """Returns the hello of this process as a worker of `role`, with other fields of a `Hello`."""
    worker = f"{role} (host {socket.gethostname()}, pid {os.getpid()})"
    return Hello(worker=worker, facts=dict(facts), **fields)


def facts_digest(facts: Mapping[str, str]) -> str:
    """Returns sixteen hexadecimal digits; the order of the keys does not matter."""
    lines = sorted(f"{key}={value!r}" for key, value in facts.items())
    return hashlib.blake2s("\n".join(lines).encode(), digest_size=8).hexdigest()


class Refusal(Exception):
    """The other end, or this one, does not want this link.

    Args:
      reason: for people.
      later: whether the other end gets ready for this one, and is to be asked again soon.
    """

    def __init__(self, reason: str, *, later: bool = False):
        super().__init__(reason)
        self.later = later


def refusal(ours: Hello, theirs: Hello) -> str:
    """Returns why two ends do not work together, naming the differences; empty if they do."""
    if ours.protocol != theirs.protocol:
        return f"protocol {theirs.protocol} of {theirs.worker}, {ours.protocol} of {ours.worker}"
    keys = [k for k in {**ours.facts, **theirs.facts} if ours.facts.get(k) != theirs.facts.get(k)]
    shown = [
        f"{key} = {theirs.facts.get(key, 'absent')}, here {ours.facts.get(key, 'absent')}"
        for key in keys
    ]
    for key, (asked, there) in theirs.formats.items():
        wanted, here = ours.formats.get(key, (asked, there))
        unknown = sorted({asked, wanted} - ({"", *there} & {"", *here}))
        shown += [f"{key} = {name}, computed there {there}, here {here}" for name in unknown]
    if len(shown) > SHOWN_DIFFERENCES:
        shown[SHOWN_DIFFERENCES:] = [f"and {len(shown) - SHOWN_DIFFERENCES} more"]
    start = f"{theirs.worker} is configured differently from {ours.worker}: "
    return start + "; ".join(shown) if shown else ""

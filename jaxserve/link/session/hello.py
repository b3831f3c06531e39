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

import msgspec

PROTOCOL = 8
"""Raised whenever a message of a session changes its meaning."""

SHOWN_DIFFERENCES = 4


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Introduction of one end; `protocol` and `digest` must be equal at both.

    Attributes:
      worker: name for people: role, host and process id.
      facts: values that both ends must agree on (model, formats, layers, …), one dotted key a
        value, so that a difference can be named.
      digest: of `facts`.
      versions: packages and platform, for people to read; they may differ.
      protocol: of the frames.
    """

    worker: str
    facts: dict[str, str]
    digest: str
    versions: dict[str, str] = {}
    protocol: int = PROTOCOL


def make_hello(role: str, facts: Mapping[str, str], *, versions: Mapping[str, str] = {}) -> Hello:
    """Returns the hello of this process as a worker of `role`."""
    return Hello(
        worker=f"{role} (host {socket.gethostname()}, pid {os.getpid()})",
        facts=dict(facts),
        digest=facts_digest(facts),
        versions=dict(versions),
    )


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
    if ours.digest == theirs.digest:
        return ""
    keys = [k for k in {**ours.facts, **theirs.facts} if ours.facts.get(k) != theirs.facts.get(k)]
    shown = [
        f"{key} = {theirs.facts.get(key, 'absent')}, here {ours.facts.get(key, 'absent')}"
        for key in keys[:SHOWN_DIFFERENCES]
    ]
    if len(keys) > SHOWN_DIFFERENCES:
        shown.append(f"and {len(keys) - SHOWN_DIFFERENCES} more")
    differences = "; ".join(shown) or f"digest {theirs.digest}, here {ours.digest}"
    return f"{theirs.worker} is configured differently from {ours.worker}: {differences}"

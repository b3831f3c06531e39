"""Names the held pages of a prompt for a KV hand-off, and counts hand-offs at either end.

A prefill worker keeps the pages of a prompt in its prefix cache, under a lease, and says so with a
`PagesSource`, which goes through the router to a decode domain. The domain fetches the token range
that its own prefix cache lacks, and then an ordinary request runs there. Imported by the engine and
the router: plain Python, no arrays.
"""

import msgspec


class PagesSource(msgspec.Struct, frozen=True):
    """KV entries of a prompt's first tokens, held by a prefill worker.

    Attributes:
      address: address of the worker's pages server, host:port; empty if nothing is held.
      hand_off: names the lease there.
      tokens: number of tokens held, in whole pages of the prefill worker; 0: none, because the
        prompt is shorter than a page.
      digest: digest of the token ids, their number, the model and the cache's format (see
        `pages_digest`); both ends compare it, and a difference fails the request.
      epoch: identifies a run of the pages server: a lease does not survive its worker.
      cached: held tokens that the prefill worker found in its prefix cache.
      queue_seconds: how long the prompt waited there until it was let in.
    """

    address: str
    hand_off: str
    tokens: int
    digest: str
    epoch: int = 0
    cached: int = 0
    queue_seconds: float = 0.0


NOTHING_HELD = PagesSource("", "", 0, "")
"""Source of a prompt that is too short to have a full page."""


class PagesLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one worker's end of the pages link, since its start.

    Attributes:
      transfers: on a domain, hand-offs that came whole; on a prefill worker, pieces that were sent.
      bytes: bytes of these, padding included.
      failures: hand-offs that did not come whole, without cancelled ones, or pieces that were
        refused or lost.
      corrupt: on a domain, pieces whose checksum was wrong, and which were fetched again.
      queued: hand-offs, or pieces, that have not ended; now.
      wait_seconds: on a domain, from the order of a hand-off to its last piece, summed over
        `transfers`.
      expired: on a prefill worker, leases that ran out.
      registered_bytes: on a prefill worker, bytes of pieces that are being read or sent; now.
      timed_out: on a domain, address of each prefill worker that it leaves alone for a while → why.
    """

    transfers: int = 0
    bytes: int = 0
    failures: int = 0
    corrupt: int = 0
    queued: int = 0
    wait_seconds: float = 0.0
    expired: int = 0
    registered_bytes: int = 0
    timed_out: dict[str, str] = {}

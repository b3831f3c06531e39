"""Names the held pages of a prompt for a KV hand-off: where they are, and of which tokens.

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
    """

    address: str
    hand_off: str
    tokens: int
    digest: str
    epoch: int = 0
    cached: int = 0


NOTHING_HELD = PagesSource("", "", 0, "")
"""Source of a prompt that is too short to have a full page."""

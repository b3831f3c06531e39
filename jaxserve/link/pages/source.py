"""The KV hand-off as its two ends name it: where the pages are, of which tokens, for how long.

A prefill worker keeps the pages of a prompt in its prefix cache, under a lease, and says so with a
`PagesSource`, which goes through the router to a decode domain. The domain fetches the token range
that its own prefix cache lacks, and then an ordinary request runs there. Imported by the engine and
the router: plain Python, no arrays.
"""

import msgspec


class PagesSource(msgspec.Struct, frozen=True):
    """KV entries of a prompt's first tokens, held by a prefill worker.

    Attributes:
      address: of the worker's pages server, host:port; empty where nothing is held.
      hand_off: names the lease there.
      tokens: how many tokens' entries are held, whole pages of the prefill worker; 0: none, as of a
        prompt shorter than a page.
      digest: of the token ids, their number, the model and the cache's format, see `pages_digest`;
        both ends compare it, and a difference fails the request.
      epoch: number of the pages server's life: a lease does not survive its worker.
      cached: tokens of those held that the prefill worker found in its prefix cache.
    """

    address: str
    hand_off: str
    tokens: int
    digest: str
    epoch: int = 0
    cached: int = 0


NOTHING_HELD = PagesSource("", "", 0, "")
"""Of a prompt that is too short to have a full page."""

"""Responses that this process keeps, so that /v1/responses can go on from one by its id.

Made by `service.py`; read and written on the server's event loop. Knows no requests.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

LIFETIME_SECONDS = 3600.0
MAX_BYTES = 64 * 2**20
"""Most bytes of all kept responses with their conversations; the oldest go first."""


class KeptResponse(msgspec.Struct, frozen=True):
    """A response.

    Attributes:
      body: the response in JSON.
      items: the conversation up to its end, a JSON list of input items.
      until: seconds of the clock at which it goes.
    """

    body: bytes
    items: bytes
    until: float

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """The responses of all tenants, bounded in bytes and time.

    Args:
      clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kept = OrderedDict[tuple[str, str], KeptResponse]()  # the oldest first
        self._bytes = 0

    def put(self, tenant: str, response_id: str, body: bytes, items: bytes) -> None:
        """Keeps a response, unless it is larger than everything may be together."""
        self.remove(tenant, response_id)
        kept = KeptResponse(body, items, self._clock() + LIFETIME_SECONDS)
        if kept.size > MAX_BYTES:
            return
        self._kept[tenant, response_id] = kept
        self._bytes += kept.size
        self._shrink()

    def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Returns a response; None if it is not kept (any more)."""
        self._shrink()
        return self._kept.get((tenant, response_id))

    def remove(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; returns whether it was kept."""
        kept = self._kept.pop((tenant, response_id), None)
        self._bytes -= 0 if kept is None else kept.size
        return kept is not None

    def _shrink(self) -> None:
        """Forgets what is too old, and the oldest while all are too large together."""
        now = self._clock()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.until > now and self._bytes <= MAX_BYTES:
                return
            self.remove(*key)

"""Gives the engine of a prefill worker its end of the pages link: a server.

Called after the engine is made and before it starts.
"""

import secrets
import time

from jaxserve.engine.engine import Engine
from jaxserve.engine.hand_off import LinkedHandOffs, PrefillEnd
from jaxserve.engine.holds import HoldLimits, Holds
from jaxserve.fleet.pages_link import page_accesses, pages_hello, piece_tokens
from jaxserve.link.pages.server import PagesServer
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Deadlines

HELD_SHARE = 0.75
"""Largest share of a prefill worker's pages that running and held prompts take together."""


def serve_pages(
    engine: Engine,
    token: str,
    address: str = "127.0.0.1:0",
    *,
    pieces: tuple[int, ...] = (),
    deadlines: Deadlines = DEFAULT_DEADLINES,
) -> PagesServer:
    """Turns an engine that is not started yet into that of a prefill worker.

    Args:
      token: the secret of the deployment.
      address: to listen on; port 0 takes a free one.
      pieces: tokens in a piece, ascending; empty: `PIECE_TOKENS`.

    Raises:
      ConfigError: no prefix cache, or an address that cannot be listened on.
    """
    deployment = engine.deployment
    pieces = pieces or piece_tokens(deployment)
    (access,) = page_accesses(engine.driver, deployment, "prefill", pieces, engine.tell)
    held = deployment.pages.held
    if access.transfer.programs.tables > 1:  # a ring for each slot (`kv_cache.ring_pages`)
        held = min(held, deployment.scheduler.slots * deployment.lanes)
    limits = HoldLimits(
        requests=held,
        pages=int(HELD_SHARE * deployment.cache.pages * deployment.attention.dp),
        lease_seconds=deployment.pages.lease_seconds,
    )
    transfer, hand_offs = access.transfer, engine.hand_off_with(LinkedHandOffs)
    server = PagesServer(
        address,
        pages_hello(deployment, transfer, "prefill"),
        token,
        hand_offs,
        token_bytes=transfer.programs.token_bytes,
        checksums=deployment.pages.checksums,
        deadlines=deadlines,
    )
    holds = Holds(engine.schedulers[0], limits, time.monotonic, lambda: secrets.token_hex(8))
    hand_offs.serve(PrefillEnd(server, access, holds))
    server.start()
    server.address = deployment.pages.address or server.address
    return server

"""Gives the engine of a domain its end of the pages link: a client for each of its schedulers.

Called after the engine is made and before it starts.
"""

from typing import cast

from jaxserve.engine.engine import Engine
from jaxserve.engine.hand_off import DecodeEnd, LinkedHandOffs
from jaxserve.engine.loop import FetchPolicy
from jaxserve.fleet.pages_link import page_accesses, pages_hello, piece_tokens
from jaxserve.link.pages.client import PagesClient
from jaxserve.link.pages.connection import Landing
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Deadlines


def fetch_pages(
    engine: Engine,
    token: str,
    *,
    pieces: tuple[int, ...] = (),
    deadlines: Deadlines = DEFAULT_DEADLINES,
) -> list[PagesClient]:
    """Lets the domains of an engine that is not started yet fetch pages of prefill workers.

    Args: see `serve_pages`.

    Returns:
      one client for each domain.

    Raises:
      ConfigError: no prefix cache, or a page size that does not divide pieces.
    """
    deployment = engine.deployment
    pieces = pieces or piece_tokens(deployment)
    ends, clients = [], []
    policy = FetchPolicy(
        recompute=deployment.pages.on_failure == "recompute",
        most=deployment.pages.recompute_tokens,
        between_steps=deployment.pages.step_tokens,
    )
    for access in page_accesses(engine.driver, deployment, "domain", pieces, engine.tell):
        transfer = access.transfer
        client = PagesClient(
            pages_hello(deployment, transfer, "decode"),
            token,
            landing=cast(Landing, transfer),
            lease_seconds=deployment.pages.lease_seconds,
            streams=deployment.pages.streams,
            deadlines=deadlines,
        )
        clients.append(client)
        ends.append(DecodeEnd(client, access))
    engine.hand_off_with(LinkedHandOffs).fetch_with(ends, policy)
    return clients

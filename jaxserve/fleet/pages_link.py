"""Gives an engine its end of the pages link: a prefill worker its server, a domain its client.

Called after an engine is made and before it starts. The two ends refuse each other unless they have
the same model and cut ranges into the same pieces; tp, page size, cache format and mode may differ.
"""

import math
from collections.abc import Sequence
from typing import cast

import jax

from jaxserve.checkpoint.fingerprint import weights_digest
from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FormatName
from jaxserve.config.load import deployment_of
from jaxserve.engine.engine import Engine
from jaxserve.engine.hand_off import DecodeEnd, LinkedHandOffs, PrefillEnd
from jaxserve.engine.holds import HoldLimits
from jaxserve.engine.loop import FetchPolicy
from jaxserve.engine.runtime import Driver
from jaxserve.errors import ConfigError
from jaxserve.fleet.membership import deployment_facts
from jaxserve.fleet.worker_frames import WorkerRole
from jaxserve.link.pages.client import PagesClient
from jaxserve.link.pages.connection import Landing
from jaxserve.link.pages.server import PagesServer
from jaxserve.link.session.channel import DEFAULT_DEADLINES, Deadlines
from jaxserve.link.session.hello import Hello, make_hello
from jaxserve.roles.page_spread import page_access
from jaxserve.roles.page_transfer import PageAccess, PageTransfer

HELD_SHARE = 0.75
"""Largest share of a prefill worker's pages that running and held prompts take together."""
PIECE_TOKENS = (32, 128)
"""Tokens in a piece, if the page sizes divide them. A piece is some megabytes, so that reading,
crossing and writing overlap. Pieces of 64 MB take three times as long in all on CPUs, where they
cause page faults."""


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
    _check(deployment)
    pieces = pieces or piece_tokens(deployment)
    access = page_access(engine.driver.kv_arrays(), exports=True, pieces=pieces)
    limits = HoldLimits(
        requests=most_held(deployment, access.transfer),
        pages=int(HELD_SHARE * deployment.cache.pages * deployment.attention.dp),
        lease_seconds=deployment.pages.lease_seconds,
        quadratic_tokens=deployment.prefill.quadratic_tokens,
    )
    transfer, hand_offs = access.transfer, engine.hand_off_with(LinkedHandOffs)
    server = PagesServer(
        address,
        pages_hello(deployment, transfer, "prefill"),
        token,
        hand_offs,
        cache_format=transfer.programs.format,
        token_bytes=transfer.programs.token_bytes,
        checksums=deployment.pages.checksums,
        deadlines=deadlines,
    )
    hand_offs.serve(PrefillEnd(server, access, limits))
    server.start()
    server.address = deployment.pages.address or server.address
    return server


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
    _check(deployment)
    pieces = pieces or piece_tokens(deployment)
    formats = _formats(deployment)
    ends, clients = [], []
    policy = FetchPolicy(
        recompute=deployment.pages.on_failure == "recompute",
        most=deployment.pages.recompute_tokens,
        between_steps=deployment.pages.step_tokens,
    )
    for domain in range(len(engine.schedulers)):
        arrays = engine.driver.kv_arrays(domain)
        access = page_access(arrays, exports=False, imports=formats, pieces=pieces)
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


def follow_pages(
    driver: Driver,
    deployment: Deployment,
    role: WorkerRole,
    pieces: tuple[int, ...],
) -> Sequence[PageAccess]:
    """Follower's part of `serve_pages` and `fetch_pages`: access to this process's share of the
    pages of every domain, for the leader's orders (`roles/actions.py`)."""
    _check(deployment)
    if role == "prefill":
        return (
            [page_access(driver.kv_arrays(), exports=True, pieces=pieces)] if driver.attends else ()
        )
    formats = _formats(deployment)
    return [
        page_access(driver.kv_arrays(domain), exports=False, imports=formats, pieces=pieces)
        for domain in range(deployment.runtime_domains if driver.attends else 0)
    ]


def pages_hello(deployment: Deployment, transfer: PageTransfer, role: str) -> Hello:
    """Returns the hello of one end of the pages link: the facts on which both ends must agree."""
    programs, known = transfer.programs, deployment_facts(deployment)
    facts = {
        "model": known["model"],
        "weights": weights_digest(deployment.model),
        "layers": str(programs.layers),
        "kv_heads": str(programs.kv_heads),
        "widths": str([(entry.width, entry.every) for entry in programs.entries]),
        "pieces": str(list(transfer.pieces)),
    }
    versions = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "cache.format": programs.format,
        "cache.page_size": str(programs.page_size),
        "attention.tp": str(programs.tp),
    }
    return make_hello(role, facts, versions=versions)


def most_held(deployment: Deployment, transfer: PageTransfer) -> int:
    """Returns the number of requests whose pages a prefill worker keeps. With rings, at most one
    for each slot, as many as there are ring pages for (`kv_cache.ring_pages`)."""
    most = deployment.pages.held
    if transfer.programs.tables == 1:
        return most
    return min(most, deployment.scheduler.slots * deployment.lanes)


def piece_tokens(deployment: Deployment) -> tuple[int, ...]:
    """Returns the tokens in a piece: `PIECE_TOKENS`, or multiples that both page sizes divide."""
    sizes = [deployment.cache.page_size]
    if deployment.prefill.workers:
        sizes.append(deployment_of(deployment, "prefill").cache.page_size)
    unit = math.lcm(*sizes)
    return tuple(sorted({-(-tokens // unit) * unit for tokens in PIECE_TOKENS}))


def _formats(deployment: Deployment) -> list[FormatName]:
    """Returns the formats in which pages may come to a domain: its own and the prefill workers'."""
    formats: dict[FormatName, None] = {deployment.cache_format: None}
    if deployment.prefill.workers:
        formats[deployment_of(deployment, "prefill").cache_format] = None
    return [*formats]


def _check(deployment: Deployment) -> None:
    if not deployment.cache.prefix:
        raise ConfigError("cache.prefix = false: hand-offs of pages fill the prefix cache")

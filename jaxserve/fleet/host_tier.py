"""Gives an engine a tier of KV pages in host memory (`cache.host_gb`).

Called before a model is loaded, which refuses what cannot work, and again after an engine is made
and before it starts. Only a process with such a tier imports this.
"""

from typing import Any

import jax

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import Loop
from jaxserve.engine.page_tier import PageTier, TieredCache, TierFetches
from jaxserve.engine.stepper import HandOffs, Post
from jaxserve.errors import ConfigError
from jaxserve.model.attention.kv_cache import ring_pages
from jaxserve.roles.host_resources import free_host_memory
from jaxserve.roles.page_programs import PagePrograms
from jaxserve.roles.page_transfer import PageAccess, PageTransfer

PAGES = (1, 4, 16, 64)
"""Pages of the pieces that cross between device and host."""
PIECE_BYTES = 8 << 20
"""Larger pieces than these are left out, but not those of one page."""


def check_host_tier(deployment: Deployment, config: ModelConfig | None = None) -> None:
    """Refuses a tier that this runtime or host cannot have.

    Args:
      config: of the model; None: its folder is read.

    Raises:
      ConfigError: the runtime has several processes, the model keeps windows or states, or the host
        lacks the memory.
    """
    gb, free = deployment.cache.host_gb, free_host_memory()
    rings = ring_pages(config or read_model(deployment)[0], deployment)
    for applies, reason in (
        (jax.process_count() > 1, f"{jax.process_count()} processes: only runtimes of one"),
        (rings, "not for layers with a window or a state"),
        (
            free is not None and gb * 1e9 > free,
            f"{(free or 0) / 1e9:.1f} GB of host memory are free",
        ),
    ):
        if applies:
            raise ConfigError(f"cache.host_gb = {gb:g}: {reason}")


def open_host_tier(engine: Engine) -> PageTier:
    """Opens the tier of an engine that is not started yet.

    Raises:
      ConfigError: as `check_host_tier`, or the tier has no room for a page.
    """
    deployment = engine.deployment
    check_host_tier(deployment)  # again: the model has taken host memory since
    cache, limit = deployment.cache, int(deployment.cache.host_gb * 1e9)
    arrays = [engine.driver.kv_arrays(domain) for domain in range(len(engine.schedulers))]
    programs = PagePrograms(arrays[0].programs, stacked=arrays[0].stacked)
    size, page_bytes = cache.page_size, cache.page_size * programs.token_bytes
    if limit < page_bytes:
        raise ConfigError(f"cache.host_gb = {cache.host_gb:g}: a page has {page_bytes:,} bytes")
    pieces = [size * pages for pages in PAGES if pages == 1 or pages * page_bytes <= PIECE_BYTES]
    formats = [deployment.cache_format]
    options: dict[str, Any] = {"exports": True, "imports": formats, "pieces": pieces}
    accesses = [
        PageAccess(PageTransfer(each.programs, stacked=each.stacked, **options), each)
        for each in arrays
    ]
    made: list[PageTier] = []

    def ended() -> bool:
        return engine.status in ("closed", "failed")

    def attach(loop: Loop, post: Post) -> HandOffs:
        made.append(PageTier(accesses, limit, loop, post, ended))
        return engine.hand_offs  # links stay as they are

    engine.hand_off_with(attach)
    (tier,) = made
    engine.host_pages = tier.counters
    for domain, scheduler in enumerate(engine.schedulers):
        fetches = TierFetches(scheduler.groups, scheduler.lanes, tier, domain)
        scheduler.fetches = scheduler.queue.fetches = fetches
        for group in scheduler.groups:
            group.cache = TieredCache(group.pool, size, tier, domain, group.index)
    return tier

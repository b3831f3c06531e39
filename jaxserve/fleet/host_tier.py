"""Gives an engine a tier of KV pages in host memory, and one in a folder or bucket below
(`cache.host_gb`, `cache.storage`).

Called before a model is loaded, which refuses what cannot work, and again after an engine is made
and before it starts. Where several processes have parts of the attention mesh, the memory is that
of the leading one, and the others take part in each read and write of pages. Only processes of a
runtime with such a tier import this.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import Loop
from jaxserve.engine.page_stores import BucketPages, DiskPages
from jaxserve.engine.page_tier import PageTier, TieredCache, TierFetches, page_sizes
from jaxserve.engine.runtime import Driver
from jaxserve.engine.stepper import HandOffs, Post
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.model.attention.kv_cache import layer_entries, ring_pages
from jaxserve.roles.capacity import free_host_memory
from jaxserve.roles.page_programs import PageForms, PagePrograms
from jaxserve.roles.page_transfer import OpenPages, PageAccess, page_access
from jaxserve.roles.token_programs import KVArrays
from jaxserve.storage.bucket import StorageBucket, is_url

PAGES = (1, 2, 8, 32)
"""Pages of the pieces that cross between device and host."""
PIECE_BYTES = 8 << 20
"""Larger pieces than these are left out, but not those of one page and two."""
FOLDER = "kv-pages"
"""Folder of the pages inside `cache.storage`, which may have other files."""


def check_host_tier(deployment: Deployment, config: ModelConfig | None = None) -> None:
    """Refuses a tier that this runtime or host cannot have.

    Args:
      config: of the model; None: its folder is read.

    Raises:
      ConfigError: every layer has a window, the host lacks the memory, or the folder or bucket
        cannot be written.
    """
    gb, free = deployment.cache.host_gb, (free_host_memory() or float("inf")) / 1e9
    if gb > free:
        raise ConfigError(f"cache.host_gb = {gb:g}: {free:.1f} GB of host memory are free")
    model = config or read_model(deployment)[0]
    kinds = [layer_entries(model, attention, deployment) for attention in model.attentions()]
    if ring_pages(model, deployment) and all(each.ring for kind in kinds for each in kind):
        text = "not for models that have a window in every layer"
        raise ConfigError(f"cache.host_gb = {gb:g}: {text}")
    if storage := deployment.cache.storage:
        try:
            if is_url(folder := storage_folder(storage)):
                StorageBucket(folder).write("probe", b"")
            else:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except (OSError, CheckpointError) as error:
            raise ConfigError(f"cache.storage = {storage}: {error}") from None
        revision(deployment.model)  # hashes the weights while they are loaded


def storage_folder(storage: str) -> str:
    """Returns the path or the URL of the folder of pages inside `cache.storage`."""
    return f"{storage.rstrip('/')}/{FOLDER}"


def page_identity(deployment: Deployment, config: ModelConfig, programs: PagePrograms) -> str:
    """Returns 16 hexadecimal digits that stand for everything but salt and tokens that the bytes of
    a page depend on: weights, formats of all numbers, and the page's form. The sizes of the meshes
    change no more than the order of sums, as in hand-offs, and are left out."""
    formats = deployment.dtype, deployment.dispatch_format, deployment.combine_format
    weights = deployment.attention.weights, deployment.ffn.weights, deployment.ffn.expert_rows
    form = [str(array) for array in programs.parts(programs.page_size, programs.format).values()]
    # The number stands for the form of the bytes, and changes with `page_tier.packed`.
    facts = 1, revision(deployment.model).digest, config, formats, weights, form
    text = msgspec.json.encode(facts, order="deterministic")  # sorts the sets of the configuration
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def tier_accesses[Access: PageAccess](
    deployment: Deployment, driver: Driver, access: Callable[[KVArrays, int, PageForms], Access]
) -> list[Access]:
    """Returns access to this process's share of the pages of every domain, for host memory.

    Args:
      access: makes one of a domain's arrays and a number; `page_transfer.page_access`, or that of
        `page_spread.py` for processes that share a mesh.
    """
    size, domains = deployment.cache.page_size, deployment.runtime_domains
    forms = PageForms([size], exports=True, imports=[deployment.cache_format], rings_last=True)
    found = []
    for domain in range(domains if driver.attends else 0):
        arrays = driver.kv_arrays(domain)
        page_bytes, _ = page_sizes(PagePrograms(arrays.programs, forms))
        fit = [count for count in PAGES if count <= 2 or count * page_bytes <= PIECE_BYTES]
        pieces = forms._replace(sizes=[size * count for count in fit])
        found.append(access(arrays, domains + domain, pieces))  # those of hand-offs come first
    return found


def open_host_tier(engine: Engine, access: OpenPages | None = None) -> None:
    """Opens the tier of an engine that is not started yet.

    Args:
      access: see `tier_accesses`; None: no other process has a part of the pages.

    Raises:
      ConfigError: as `check_host_tier`, or the tier has no room for a page.
    """
    deployment = engine.deployment
    check_host_tier(deployment)  # again: the model has taken host memory since
    cache, limit = deployment.cache, int(deployment.cache.host_gb * 1e9)
    accesses = tier_accesses(deployment, engine.driver, access or page_access)
    programs, config = accesses[0].transfer.programs, engine.driver.kv_arrays().programs.config
    _, most = page_sizes(programs)
    if limit < most:
        raise ConfigError(f"cache.host_gb = {cache.host_gb:g}: a page has {most:,} bytes")

    def attach(loop: Loop, post: Post) -> HandOffs:
        tier = PageTier(accesses, limit, loop, post, lambda: engine.status in ("closed", "failed"))
        engine.host_pages = tier.counters
        if cache.storage:
            identity = page_identity(deployment, config, programs)
            folder, bound = storage_folder(cache.storage), int(cache.storage_gb * 1e9)
            pages = BucketPages if is_url(folder) else DiskPages
            tier.disk = pages(folder, bound, identity, tier.counters)
        for domain, scheduler in enumerate(engine.schedulers):
            fetches = TierFetches(scheduler.groups, scheduler.lanes, tier, domain)
            scheduler.fetches = scheduler.queue.fetches = fetches
            for group in scheduler.groups:
                group.cache = TieredCache(group, cache.page_size, tier, domain)
        return engine.hand_offs  # links stay as they are

    engine.hand_off_with(attach)

"""The pages link of a fleet: what its two ends have in common, and the part of followers.

The two ends refuse each other unless they have the same model, cut ranges into the same pieces and
both compute the prefill worker's cache format; tp, page size and mode may differ, and the format of
the domain's own pages.
"""

import math

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.engine.runtime import Driver
from jaxserve.errors import ConfigError
from jaxserve.fleet.agreement import deployment_facts
from jaxserve.fleet.computed_formats import computed_formats, versioned
from jaxserve.fleet.worker_frames import WorkerRole
from jaxserve.link.pages.frames import CACHE_FORMAT
from jaxserve.link.session.hello import Hello, make_hello
from jaxserve.roles.page_programs import PageForms
from jaxserve.roles.page_spread import LedPages, Tell, no_one, page_access
from jaxserve.roles.page_transfer import PageTransfer

ENDS = {
    "prefill": "jaxserve.fleet.prefill_end:serve_pages",
    "domain": "jaxserve.fleet.domain_end:fetch_pages",
}
"""Gives an engine its end of the link, by the worker's role; a process imports its own alone."""
PIECE_TOKENS = (32, 128)
"""Tokens in a piece, if the page sizes divide them. A piece is some megabytes, so that reading,
crossing and writing overlap. Pieces of 64 MB take three times as long in all on CPUs, where they
cause page faults."""


def page_accesses(
    driver: Driver,
    deployment: Deployment,
    role: WorkerRole,
    pieces: tuple[int, ...],
    tell: Tell = no_one,
) -> list[LedPages]:
    """Returns access to this process's share of the pages of every domain, for hand-offs.

    Args:
      tell: see `LedPages`; a follower has none.

    Raises:
      ConfigError: no prefix cache, or a page size that does not divide pieces.
    """
    if not deployment.cache.prefix:
        raise ConfigError("cache.prefix = false: hand-offs of pages fill the prefix cache")
    serves = role == "prefill"
    imports = () if serves else [*dict.fromkeys(end.cache_format for end in _ends(deployment))]
    forms = PageForms(pieces, exports=serves, imports=imports)
    return [
        page_access(driver.kv_arrays(domain), domain, forms, tell=tell)
        for domain in range(deployment.runtime_domains if driver.attends else 0)
    ]


def pages_hello(deployment: Deployment, transfer: PageTransfer, role: str) -> Hello:
    """Returns the hello of one end of the pages link: the facts on which both ends must agree."""
    programs, agreed = transfer.programs, deployment_facts(deployment)
    facts = {
        "model": agreed["model"],
        "weights": revision(deployment.model).digest,
        "layers": str(programs.layers),
        "kv_heads": str(programs.heads),
        "widths": str([(entry.width, entry.every) for entry in programs.entries]),
        "pieces": str(list(transfer.pieces)),
    }
    known, taken = computed_formats(), transfer.imports
    formats = ("", [name for name in known if name in taken]) if taken else (programs.format, known)
    return make_hello(versioned(role), facts, formats={CACHE_FORMAT: formats})


def piece_tokens(deployment: Deployment) -> tuple[int, ...]:
    """Returns the tokens in a piece: `PIECE_TOKENS`, or multiples that both page sizes divide."""
    unit = math.lcm(*(end.cache.page_size for end in _ends(deployment)))
    return tuple(sorted({-(-tokens // unit) * unit for tokens in PIECE_TOKENS}))


def _ends(deployment: Deployment) -> list[Deployment]:
    """Returns the deployments of a domain and, if there are any, of prefill workers."""
    roles = ["domain", *(["prefill"] if deployment.prefill.workers else [])]
    return [deployment_of(deployment, role) for role in roles]

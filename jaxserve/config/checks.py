"""Checks that the sections of a deployment fit each other, and derives values from them.

Called by `load.py`. Every error names the key, its value, and the arithmetic.
"""

from collections.abc import Sequence

import msgspec

from jaxserve.config.deployment import Deployment, check_slice, runtime_roles, scratch_pages
from jaxserve.config.formats import FORMATS, choices, scaled
from jaxserve.config.shipped import hardware_file
from jaxserve.config.topology import BETWEEN, TRANSPORTS
from jaxserve.errors import ConfigError

FORMAT_KEYS: dict[tuple[str, ...], str] = {
    ("attention", "weights"): "weights",
    ("ffn", "weights"): "weights",
    ("link", "dispatch"): "dispatch",
    ("cache", "format"): "cache",
}
"""Uses of the keys that name a number format."""
_CACHES = (
    "; nothing here attends to keys and values in fewer bits: int8 is the smallest on all "
    "platforms (half of bfloat16, and a scale a token and head), fp8 as small on GPUs, CPUs and "
    "TPUs from v7x on"
)


def refuse_formats(deployment: Deployment) -> None:
    """Checks that every key that names a number format has one that its use offers.

    Raises:
      ConfigError: a key has another format; names the formats that it may have.
    """
    for (section, key), use in FORMAT_KEYS.items():
        name, known = getattr(getattr(deployment, section), key), choices(use)
        if name not in ("auto", *known):
            raise ConfigError(
                f"{section}.{key} = {name}: expected auto or one of {', '.join(known)}"
                + (_CACHES if use == "cache" else "")
            )


def complete(deployment: Deployment) -> Deployment:
    """Fills the derived buckets in and checks sizes against each other.

    Raises:
      ConfigError: they do not fit; names the keys.
    """
    limits, cache = deployment.scheduler, deployment.cache
    if limits.token_budget < limits.slots:
        raise ConfigError(
            f"scheduler.token_budget = {limits.token_budget} is below scheduler.slots = "
            f"{limits.slots}: a step could not hold one token of every sequence"
        )
    drafted = limits.slots * (1 + deployment.drafts)
    if deployment.drafts and limits.token_budget < drafted:
        raise ConfigError(
            f"scheduler.token_budget = {limits.token_budget} is below scheduler.slots x (1 + "
            f"speculative.drafts) = {limits.slots} x {1 + deployment.drafts} = {drafted}: a step "
            "could not verify the drafts of every sequence"
        )
    for role in ("attention", "ffn"):
        weights = getattr(deployment, role).weights
        if weights != "auto" and FORMATS[weights].bits > FORMATS[deployment.dtype].bits:
            raise ConfigError(
                f"{role}.weights = {weights} is not dtype = {deployment.dtype}: weights are in "
                "that or in fewer bits"
            )
    shared, ranks = deployment.ffn.shared_ranks, deployment.expert_ranks
    if shared >= ranks:
        key = "attention.dp" if deployment.topology.has("colocated") else "ffn.ep"
        raise ConfigError(
            f"ffn.shared = ranks:{shared} of {key} = {ranks} ranks leaves none for the routed "
            "experts"
        )
    if cache.rope != "auto" and not scaled(deployment.cache_format):
        raise ConfigError(
            f"cache.rope = {cache.rope} keeps a part of rows in 8 bits out of them, but "
            f"cache.format = {cache.format} is {deployment.cache_format}"
        )
    if (cache.storage and not cache.host_gb) or (cache.host_gb and not cache.prefix):
        raise ConfigError(f"{cache.storage=} needs {cache.host_gb=}, which needs {cache.prefix=}")
    _check_runtimes(deployment)
    if deployment.whole_steps and (reason := step_refusal(deployment)):
        raise ConfigError(f"pipeline = step: {reason}")
    _check_slices(deployment)
    _check_fleet(deployment)
    longest = -(-limits.max_length // cache.page_size)
    page_buckets = limits.page_buckets or sorted({-(-longest // 4), longest})
    token_buckets = limits.token_buckets or sorted({limits.slots, drafted, limits.token_budget})
    for name, buckets, last, meaning in (
        ("token_buckets", token_buckets, limits.token_budget, "scheduler.token_budget"),
        ("page_buckets", page_buckets, longest, "ceil(scheduler.max_length / cache.page_size)"),
    ):
        if buckets != sorted(set(buckets)) or buckets[-1] != last:
            raise ConfigError(
                f"scheduler.{name} = {buckets}: must ascend and end at {meaning} = {last}"
            )
    scratch = scratch_pages(deployment.drafts, deployment.modules)
    if cache.pages < longest + scratch:
        beside = ", and one is scratch for drafts" if scratch else ""
        raise ConfigError(
            f"cache.pages = {cache.pages} cannot hold one sequence of scheduler.max_length = "
            f"{limits.max_length} tokens: that takes {longest} pages of {cache.page_size}{beside}"
        )
    made = msgspec.structs.replace(limits, token_buckets=token_buckets, page_buckets=page_buckets)
    return msgspec.structs.replace(deployment, scheduler=made)


def least_slice(devices: int, cores: int, torus: int) -> int:
    """Returns the number of JAX devices in the smallest TPU slice with at least `devices` of them.

    Slices have 4, 8, 16, … chips. A torus of two dimensions also has slices of a single chip, and
    one of three dimensions all multiples of 64 chips. Google Cloud rents no slice of two chips.

    Args:
      cores: JAX devices of a chip.
      torus: dimensions of the torus.
    """
    chips = -(-devices // cores)
    if chips == 1 and torus == 2:
        return cores
    step = 64 if torus == 3 and chips > 64 else max(4, 1 << (chips - 1).bit_length())
    return cores * step * -(-chips // step)


def _check_slices(deployment: Deployment) -> None:
    """Checks each runtime on the smallest TPU slice that holds it. Chips of the slice may stay
    unused. Raises as `check_slice`."""
    tpu = hardware_file(deployment.attention.hardware or deployment.ffn.hardware)
    runtimes, cores = runtime_roles(deployment), tpu.get("jax_devices", 1)
    for roles in runtimes if "torus" in tpu else ():
        least = deployment.devices if len(runtimes) == 1 else sum(roles.values())
        check_slice(least_slice(least, cores, tpu["torus"]), roles)


def _check_runtimes(deployment: Deployment) -> None:
    """Raises ConfigError if roles, runtimes and transport contradict each other."""
    attention, ffn, link = deployment.attention, deployment.ffn, deployment.link
    apart = TRANSPORTS[link.transport].crosses_runtimes
    if deployment.topology.has("colocated"):
        if apart:
            raise ConfigError(f"link.transport = {link.transport}: mode colocated has no link")
        return
    workers = ffn.instances if apart else 1
    for name, role, of in (("attention", attention, 1), ("ffn", ffn, workers)):
        if role.processes and role.devices % (role.processes * of):
            raise ConfigError(
                f"{name}.processes = {role.processes} does not divide the {role.devices // of} "
                f"devices of one {name} worker"
            )
    if not apart and attention.hardware and ffn.hardware not in ("", attention.hardware):
        raise ConfigError(
            f"ffn.hardware = {ffn.hardware} in a runtime with {attention.hardware}: pull joins two"
        )
    if apart != (attention.runtime != ffn.runtime):
        raise ConfigError(
            f"attention.runtime = {attention.runtime} and ffn.runtime = {ffn.runtime}, but "
            f"link.transport = {link.transport}: {', '.join(BETWEEN)} joins two runtimes, the "
            "others work inside one"
        )
    if ffn.instances > 1:
        _check_instances(deployment)
    if apart != bool(link.addresses):
        raise ConfigError(
            f"link.addresses = {link.addresses}, but link.transport = {link.transport}: "
            f"{', '.join(BETWEEN)} needs the addresses of ffn workers, the others use none"
        )
    if apart and len(link.addresses) % (max(1, ffn.processes) * ffn.instances):
        raise ConfigError(
            f"link.addresses: {len(link.addresses)}, but ffn.processes = {ffn.processes} and "
            f"ffn.instances = {ffn.instances}: each process of an ffn worker has an address, those "
            "of a worker follow each other, and each instance has as many workers"
        )
    if link.route == "broadcast" and ffn.exchange == "alltoall":
        raise ConfigError(
            "link.route = broadcast brings every token to every ffn device, and ffn.exchange = "
            "alltoall only to some"
        )
    check_addresses("link.addresses", link.addresses)


def step_refusal(deployment: Deployment) -> str:
    """Returns why `pipeline: step` cannot run separate meshes so; empty if it can."""
    link, ffn = deployment.link.transport, deployment.ffn
    a, tp, f = deployment.attention.devices, deployment.attention.tp, ffn.devices // ffn.instances
    reasons = (
        (deployment.topology.crosses_runtimes, f"link.transport = {link} joins two runtimes"),
        (deployment.domains > 1, f"domains = {deployment.domains}: only one"),
        (deployment.attention.output != "whole", "attention.output = split: only whole"),
        (deployment.scheduler.spread, "scheduler.spread = true: only false"),
        (a % f > 0, f"attention's {a} devices are no multiple of an ffn instance's {f}"),
        (a > f and f % tp > 0, f"attention.tp = {tp} does not divide an ffn instance's {f}"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _check_instances(deployment: Deployment) -> None:
    """Raises ConfigError if the ffn role cannot have several instances."""
    attention, ffn = deployment.attention, deployment.ffn
    start = f"ffn.instances = {ffn.instances}"
    if ffn.ep % ffn.instances:
        raise ConfigError(f"{start} does not divide ffn.ep = {ffn.ep}")
    apart = deployment.topology.crosses_runtimes or deployment.pipeline == "step"
    if not apart and attention.devices % ffn.devices:
        raise ConfigError(
            f"{start}: attention's {attention.devices} devices are no multiple of the ffn role's "
            f"{ffn.devices}"
        )
    if ffn.shared_ranks:
        raise ConfigError(
            f"{start}, but with ffn.shared = {ffn.shared} these ranks take turns with the rows of "
            "one"
        )


def _check_fleet(deployment: Deployment) -> None:
    """Raises ConfigError if prefill workers, domains and the router contradict each other."""
    prefill, fleet, pages = deployment.prefill, deployment.fleet, deployment.pages
    if bool(prefill.long_tokens) != bool(prefill.long_workers):
        raise ConfigError(f"{prefill.long_tokens=} and {prefill.long_workers=} need each other")
    if bool(fleet.long_tokens) != bool(fleet.long_domains):
        raise ConfigError(f"{fleet.long_tokens=} and {fleet.long_domains=} need each other")
    if prefill.long_workers and prefill.long_workers >= prefill.workers:
        raise ConfigError(f"{prefill.long_workers=} of {prefill.workers=}: none for short prompts")
    if prefill.workers and not deployment.cache.prefix:
        raise ConfigError(
            f"prefill.workers = {prefill.workers}, but cache.prefix = false: a domain takes pages "
            "into its prefix cache"
        )
    if pages.on_failure == "fail" and pages.recompute_tokens:
        raise ConfigError(f"{pages.recompute_tokens=}, but {pages.on_failure=}: none is recomputed")
    if fleet.late == "refuse" and not fleet.ttft_seconds and not fleet.tpot_seconds:
        raise ConfigError(
            f"{fleet.late=}: {fleet.ttft_seconds=} and {fleet.tpot_seconds=}: no target"
        )
    for key in ("least_domains", "rebalance_roles"):
        if (value := getattr(fleet, key)) and not prefill.workers:
            raise ConfigError(
                f"fleet.{key} = {str(value).lower()}, but prefill.workers = 0: nobody could become "
                "a domain"
            )
    for key in ("listen", "address"):
        check_addresses(f"pages.{key}", [getattr(pages, key) or "unused:1"])
    check_addresses("weights.peers", deployment.weights.peers)
    check_addresses("weights.address", [deployment.weights.address or "unused:1"])
    if deployment.experts.source == "peer" and not deployment.weights.peers:
        raise ConfigError("experts.source = peer, but weights.peers is empty: there are none")
    check_addresses("fleet.prefill", fleet.prefill)
    check_addresses("fleet.domains", fleet.domains)
    for place, address in enumerate(fleet.domains):
        if address in fleet.prefill:
            raise ConfigError(f"fleet.domains[{place}] = {address}: is in fleet.prefill, too")
    if fleet.prefill and not fleet.domains:
        raise ConfigError(
            f"fleet.domains: empty, so the {len(fleet.prefill)} workers of fleet.prefill have "
            "nobody to hand over to"
        )
    if fleet.registry == "kubernetes" or not fleet.domains:
        return
    if fleet.least_domains > len(fleet.domains):
        raise ConfigError(f"{fleet.least_domains=} of {fleet.domains=}: these are fewer")
    if fleet.long_domains >= len(fleet.domains):
        raise ConfigError(f"{fleet.long_domains=} of {fleet.domains=}: none for short sequences")
    if len(fleet.prefill) != prefill.workers:
        raise ConfigError(f"{fleet.prefill=}: {prefill.workers=} need an address each")
    if deployment.topology.separates_domains and len(fleet.domains) != deployment.domains:
        raise ConfigError(
            f"fleet.domains: {len(fleet.domains)} addresses, but domains = {deployment.domains}, "
            "each of which listens for itself"
        )


def check_addresses(key: str, addresses: Sequence[str]) -> None:
    """Raises ConfigError unless all addresses are host:port and different."""
    for place, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{key}[{place}] = {address!r}: expected host:port")
        if address in addresses[:place]:
            raise ConfigError(f"{key}[{place}] = {address}: is there twice")

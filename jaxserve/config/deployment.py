"""A deployment: which model, on which meshes, in which number formats, with which limits.

`load.py` reads one from a file and checks it. The docstring of every key is its entry in
`docs/keys.md` (`reference.py` writes it).
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxserve.config import sections
from jaxserve.config.fleet_sections import Fleet, Pages, PeerWeights, Prefill
from jaxserve.config.formats import Floats, FormatName
from jaxserve.config.topology import Mode, Topology, topology_of
from jaxserve.errors import ConfigError


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a deployment file says."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json; relative to the YAML file. Or
    its URL in a bucket, `gs://BUCKET/PATH` or `s3://BUCKET/PATH`: each process reads its devices'
    parts."""
    ignored_model_keys: list[str] = []
    """Entries of the model's config.json that are unknown here but do not affect its mathematics;
    other unknown entries are refused."""
    mode: Mode = "afd"
    """`afd`: separate attention and ffn meshes; `colocated`: one mesh of the attention role's
    sizes, one program per step. `auto`: `colocated`, unless the file has sizes of an ffn mesh or
    of a link."""
    dtype: Floats = "bfloat16"
    """Dtype of weights and activations: `bfloat16` or `float32`. `auto`: `float32` on CPUs, which
    multiply it faster, where it fits; else `bfloat16`."""
    strict_kernels: bool = False
    """Whether a worker on a TPU or a GPU refuses to start where a program has no kernel for the
    model's sizes or formats, and plain XLA would run far more slowly, or where pages are too small
    for its kernel (under 64 tokens on a TPU); false: it logs a warning.
    `serve --check` says both for the `hardware` that the roles name. Where they name none, it says
    for which platforms kernels are missing, and refuses if that is each of them."""
    lanes: Annotated[int, Meta(ge=1, le=4)] = 1
    """Microbatches in flight at the same time."""
    pipeline: Literal["auto", "layer", "step"] = "auto"
    """How steps are driven. `layer`: those of separate attention and ffn meshes by the host, a call
    a stage and layer. `step`: by programs with all layers and lanes and the messages between the
    roles, so that the host does not drive layers. In colocated mode a program runs the steps of two
    lanes; the rows of one travel to their experts and back while the other computes (compiled for
    GPUs and TPUs, never run on one so far). A step that is lost takes the steps of all lanes along.
    Where every process plays one role, each role has its program: on CPUs, and compiled for GPUs
    (never run on one so far). Attention's devices are a multiple of an ffn instance's. Where every
    process has equally many devices of both roles, one program has both, if one of `attention.tp`
    and `ffn.tp` is 1 or both are equal: on CPUs, where each device holds the weights and pages of
    both roles; and compiled for TPUs (never run on one so far), where pages and experts share
    memory, for GQA, MFA and MLA without indexers and experts in 8 or 16 bits. There a lost step
    takes the experts along, too, which are then loaded again. `auto`: `layer`; where one process
    has all devices, and they are CPUs, `step` for one lane, if it can run and its memory fits."""
    attention: sections.AttentionRole = sections.AttentionRole()
    ffn: sections.FFNRole = sections.FFNRole()
    link: sections.Link = sections.Link()
    cache: sections.Cache = sections.Cache()
    scheduler: sections.SchedulerLimits = sections.SchedulerLimits()
    speculative: sections.Speculative = sections.Speculative()
    domains: sections.Size = 1
    """Attention workers, each with its own scheduler and KV cache: around one ffn worker, or in
    colocated mode each by itself."""
    prefill: Prefill = Prefill()
    experts: sections.Experts = sections.Experts()
    weights: PeerWeights = PeerWeights()
    pages: Pages = Pages()
    fleet: Fleet = Fleet()
    server: sections.Server = sections.Server()
    cluster: sections.Cluster = sections.Cluster()

    @property
    def topology(self) -> Topology:
        """Roles with a mesh each, and the boundary between them."""
        return topology_of(self.mode, self.link.transport)

    @property
    def whole_steps(self) -> bool:
        """Whether programs run whole steps of separate attention and ffn meshes."""
        return self.pipeline == "step" and self.topology.has("ffn")

    @property
    def dispatch_format(self) -> FormatName:
        """`link.dispatch` with `auto` resolved."""
        return self.dtype if self.link.dispatch == "auto" else self.link.dispatch

    @property
    def combine_format(self) -> FormatName:
        """`link.combine` with `auto` resolved."""
        return self.dtype if self.link.combine == "auto" else self.link.combine

    @property
    def cache_format(self) -> FormatName:
        """`cache.format` with `auto` resolved."""
        return self.dtype if self.cache.format == "auto" else self.cache.format

    @property
    def drafts(self) -> int:
        """Most drafts of a sequence and step; 0 without drafts."""
        return 0 if self.speculative.method == "none" else self.speculative.drafts

    @property
    def modules(self) -> int:
        """Modules of multi-token prediction that are loaded, at most one for each draft."""
        return min(self.speculative.modules, self.drafts) if self.speculative.method == "mtp" else 0

    @property
    def runtime_domains(self) -> int:
        """Attention workers of one runtime: `domains` if they share it with their ffn worker, and 1
        if each has a runtime of its own."""
        return 1 if self.topology.separates_domains else self.domains

    @property
    def expert_ranks(self) -> int:
        """Ranks of experts: `ffn.ep`, in colocated mode DP groups."""
        return self.attention.dp if self.topology.has("colocated") else self.ffn.ep

    def shares_processes(self, processes: int) -> bool:
        """Returns whether each process has an equal part of both roles' devices, instead of playing
        one role. True if `attention.processes` and `ffn.processes` both have this number, or if
        neither is set and the roles do not divide over processes of their own."""
        a, f = self.attention, self.ffn
        if processes == 1 or self.topology.separates_domains:
            return False
        if a.processes or f.processes:
            return a.processes == f.processes == processes
        divides = not a.devices % processes and not f.devices % processes
        return divides and not self.separate_splits(processes)

    def separate_splits(self, processes: int) -> list[tuple[int, int]]:
        """Numbers of processes for attention and for ffn that divide their devices evenly."""
        splits = [(first, processes - first) for first in range(1, processes)]
        devices = self.attention.devices, self.ffn.devices
        return [(a, f) for a, f in splits if not devices[0] % a and not devices[1] % f]

    @property
    def devices(self) -> int:
        """Devices of the deployment's runtime, or of the runtimes of both roles together."""
        attention = self.runtime_domains * self.attention.devices
        return attention + (self.ffn.devices if self.topology.has("ffn") else 0)


def scratch_pages(drafts: int, modules: int) -> int:
    """Pages of a DP group that no sequence gets: one if a prediction module makes more than one
    draft. It then writes entries behind a sequence's last token, perhaps behind its last page; page
    tables name page 0 there."""
    return int(0 < modules < drafts)


def divide_slice(size: int, counts: Iterable[int]) -> bool:
    """Returns whether roles of these numbers of devices can be on a TPU slice of `size` devices.
    libtpu compiles a collective only if its number of devices divides the slice's: it refuses
    others, or aborts the process."""
    return all(size % count == 0 for count in counts)


def runtime_roles(deployment: Deployment) -> list[dict[str, int]]:
    """Devices by role of each runtime: over `pull` each role has one of its own."""
    a, f = deployment.attention.devices, deployment.ffn.devices
    if deployment.topology.crosses_runtimes:
        return [{"attention": a}, {"ffn": f // deployment.ffn.instances}]
    return [{"attention": a} | ({"ffn": f} if deployment.topology.has("ffn") else {})]


def check_slice(size: int, roles: Mapping[str, int]) -> None:
    """Checks the roles of one runtime on a TPU slice of `size` devices (`divide_slice`).

    Args:
      roles: devices by role.

    Raises:
      ConfigError: the slice cannot run them.
    """
    if divide_slice(size, roles.values()):
        return
    told = " and ".join(f"{count} devices of {role}" for role, count in roles.items())
    advice = "; equal halves do, and link.transport = pull gives each its slice"
    raise ConfigError(
        f"{told} on a TPU slice of {size}: each role's number must divide it, or libtpu "
        f"compiles no collectives{advice * (len(roles) > 1)}"
    )

"""A deployment: which model, on which meshes, in which number formats, with which limits.

Read from one YAML file, with dotted overrides from the command line (`--set attention.dp=3`) or
from Python (`overrides={"attention.dp": 3}`). An unknown key is an error that names the nearest
known one. The docstring of every key is its entry in `configs/README.md` (`reference.py` writes
it). Imports only `errors`, the rest of this room, and what a bucket's URL is.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from jaxserve.config.auto import Choose, drop_auto, written_keys
from jaxserve.config.checks import complete, refuse_int4_cache
from jaxserve.config.roles import expand_roles
from jaxserve.config.sections import (
    SERVER_FILES,
    AttentionRole,
    Cache,
    Cluster,
    Experts,
    FFNRole,
    Fleet,
    Link,
    Pages,
    PeerWeights,
    Prefill,
    SchedulerLimits,
    Server,
    Size,
    Speculative,
)
from jaxserve.config.shipped import deployment_names, deployment_path
from jaxserve.errors import ConfigError
from jaxserve.storage.bucket import is_url


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that a `serve` command reads from its deployment file."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json; relative to the YAML file. Or
    its URL in a bucket, `gs://BUCKET/PATH` or `s3://BUCKET/PATH`: each process reads its devices'
    parts."""
    ignored_model_keys: list[str] = []
    """Entries of the model's config.json that are unknown here but do not affect its mathematics;
    other unknown entries are refused."""
    mode: Literal["afd", "colocated"] = "afd"
    """`afd`: separate attention and ffn meshes; `colocated`: one mesh of the attention role's
    sizes, one program per step. `auto`: `colocated`, unless the file has sizes of an ffn mesh or
    of a link."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
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
    attention: AttentionRole = AttentionRole()
    ffn: FFNRole = FFNRole()
    link: Link = Link()
    cache: Cache = Cache()
    scheduler: SchedulerLimits = SchedulerLimits()
    speculative: Speculative = Speculative()
    domains: Size = 1
    """Attention workers, each with its own scheduler and KV cache: around one ffn worker, or in
    colocated mode each by itself."""
    prefill: Prefill = Prefill()
    experts: Experts = Experts()
    weights: PeerWeights = PeerWeights()
    pages: Pages = Pages()
    fleet: Fleet = Fleet()
    server: Server = Server()
    cluster: Cluster = Cluster()

    @property
    def dispatch_format(self) -> Literal["float32", "bfloat16", "fp8", "int8"]:
        """`link.dispatch` with `auto` resolved."""
        return self.dtype if self.link.dispatch == "auto" else self.link.dispatch

    @property
    def combine_format(self) -> Literal["float32", "bfloat16", "int8"]:
        """`link.combine` with `auto` resolved."""
        return self.dtype if self.link.combine == "auto" else self.link.combine

    @property
    def cache_format(self) -> Literal["float32", "bfloat16", "fp8", "int8"]:
        """`cache.format` with `auto` resolved."""
        return self.dtype if self.cache.format == "auto" else self.cache.format

    @property
    def drafts(self) -> int:
        """Most drafts of a sequence and step; 0: there are none."""
        return 0 if self.speculative.method == "none" else self.speculative.drafts

    @property
    def modules(self) -> int:
        """Modules of multi-token prediction that are loaded; no more than there are drafts."""
        if self.speculative.method != "mtp":
            return 0
        return min(self.speculative.modules, self.speculative.drafts)

    @property
    def runtime_domains(self) -> int:
        """Attention workers of one runtime: `domains`, where they share it with their ffn worker;
        otherwise each has a runtime of its own."""
        apart = self.mode == "colocated" or self.link.transport == "pull"
        return 1 if apart else self.domains

    @property
    def expert_ranks(self) -> int:
        """Ranks of experts: `ffn.ep`, in colocated mode DP groups."""
        return self.attention.dp if self.mode == "colocated" else self.ffn.ep

    def shares_processes(self, processes: int) -> bool:
        """Whether each of so many processes has an equal part of both roles' devices, in place of
        one role's: where `attention.processes` and `ffn.processes` both say that number, or say
        nothing and the roles do not divide over processes of their own."""
        a, f = self.attention, self.ffn
        if self.mode == "colocated" or processes == 1 or self.link.transport == "pull":
            return False
        if a.processes or f.processes:
            return a.processes == f.processes == processes
        divides = not a.devices % processes and not f.devices % processes
        return divides and not self.separate_splits(processes)

    def separate_splits(self, processes: int) -> list[tuple[int, int]]:
        """Numbers of processes for attention and for ffn over which their devices divide evenly."""
        splits = [(first, processes - first) for first in range(1, processes)]
        devices = self.attention.devices, self.ffn.devices
        return [(a, f) for a, f in splits if not devices[0] % a and not devices[1] % f]

    @property
    def devices(self) -> int:
        """Devices of the runtime that the deployment is, or of all of its two roles' runtimes."""
        colocated = self.mode == "colocated"
        attention = self.runtime_domains * self.attention.devices
        return attention + (0 if colocated else self.ffn.devices)


def load_deployment(
    path: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    choose: Choose | None = None,
) -> Deployment:
    """Reads a deployment file and applies dotted overrides.

    Args:
      path: the YAML file, the name of one that comes with jaxserve (`demo`), or a model folder or
        its URL (then every other field has its default).
      overrides: `{"attention.dp": 3}` or `["attention.dp=3"]`; the latter's values are YAML.
      choose: values for the keys that are `auto` (`auto.py`); None: fixed ones.

    Raises:
      ConfigError: the file is missing, a key is unknown (names the nearest one), a value is out
        of range, or sizes do not fit each other.
    """
    model = str(path) if is_url(path) else "."
    path = Path() if is_url(path) else deployment_path(Path(path))
    try:
        text = "" if path.is_dir() else path.read_text()
    except FileNotFoundError:
        known = ", ".join(deployment_names())
        raise ConfigError(
            f"deployment file {path}: No such file or directory; by name there are {known}"
        ) from None
    except OSError as error:
        raise ConfigError(f"deployment file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"deployment file {path} is no text: {error}") from None
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"deployment file {path} is no YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"deployment file {path}: expected keys, got {type(tree).__name__}")
    base = path if path.is_dir() else path.parent
    if path.is_dir():
        tree["model"] = model
    if isinstance(tree.get("model"), str) and not is_url(tree["model"]):
        tree["model"] = str((base / tree["model"]).resolve())
    server = tree.get("server")
    if isinstance(server, dict):
        for key in SERVER_FILES:
            if isinstance(server.get(key), str) and server[key]:
                server[key] = str((base / server[key]).resolve())
    for key, value in _override_items(overrides):
        _set(tree, key, value)
    expand_roles(tree)
    _check_keys(tree, Deployment, "")
    drop_auto(tree)
    deployment = _converted(tree)
    if choose is not None:
        for key, value in choose(deployment, written_keys(tree)).items():
            _set(tree, key, value)
        deployment = _converted(tree)
    deployment = complete(deployment)
    if deployment.prefill.workers:
        prefill = deployment_of(deployment, "prefill")  # refuses what does not fit
        if prefill.cache.rope != deployment.cache.rope:
            raise ConfigError(
                f"prefill.cache.rope = {prefill.cache.rope}, but cache.rope = "
                f"{deployment.cache.rope}: pages are handed over in arrays of the same widths"
            )
        apart = deployment.mode != "colocated" and deployment.link.transport == "pull"
        needed = deployment.attention.devices if apart else deployment.devices
        if deployment.fleet.least_domains and prefill.devices < needed:
            raise ConfigError(
                f"fleet.least_domains = {deployment.fleet.least_domains}: a domain needs {needed} "
                f"devices, a prefill worker that were to stand in for one has {prefill.devices}"
            )
    return deployment


def _converted(tree: Mapping[str, Any]) -> Deployment:
    refuse_int4_cache(tree)
    try:
        return msgspec.convert(tree, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigError(f"deployment: {error}") from None


def deployment_of(deployment: Deployment, role: str) -> Deployment:
    """What one worker of a role runs.

    Args:
      deployment: of the fleet.
      role: `prefill`, whose workers have a deployment of their own, without the rest of the fleet;
        or any other role.

    Raises:
      ConfigError: what differs on prefill workers is wrong, or does not fit the rest; names the
        key below `prefill`.
    """
    prefill = deployment.prefill
    if role != "prefill":
        return deployment
    tree = msgspec.to_builtins(deployment)
    tree |= {"domains": 1, "fleet": {}}
    tree["prefill"] = {"quadratic_tokens": prefill.quadratic_tokens}
    if prefill.mode == "colocated" and deployment.mode != "colocated":
        tree["link"] = {}
    if prefill.mode:
        tree["mode"] = prefill.mode
    if prefill.lanes:
        tree["lanes"] = prefill.lanes
    if not prefill.scheduler.keys().isdisjoint(("slots", "token_budget")):
        tree["scheduler"]["token_buckets"] = []  # derived anew
    if "max_length" in prefill.scheduler or "page_size" in prefill.cache:
        tree["scheduler"]["page_buckets"] = []
    for name in PREFILL_SECTIONS:
        tree[name] |= getattr(prefill, name)
    try:
        _check_keys(tree, Deployment, "")
        refuse_int4_cache(tree)
        return complete(msgspec.convert(tree, Deployment))
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"prefill: {error}") from None


PREFILL_SECTIONS = ("attention", "ffn", "link", "cache", "scheduler")
"""Sections of which a prefill worker may have keys of its own."""


def _override_items(overrides: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    items = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text!r}: expected key=value, as in attention.dp=3")
        try:
            items.append((key.strip(), yaml.safe_load(value)))
        except yaml.YAMLError:
            raise ConfigError(f"--set {text!r}: {value!r} is no YAML value") from None
    return items


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {dotted}: {parent} is a value, not a section")
    tree[last] = value


def _check_keys(tree: Mapping[Any, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in known:
            everything = known_keys()
            near = difflib.get_close_matches(f"{prefix}{key}", everything, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key {prefix}{key!s}{hint}")
        section = known[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}: expected a section, got {value!r}")
            _check_keys(value, section, f"{prefix}{key}.")


def known_keys(struct: type[msgspec.Struct] = Deployment, prefix: str = "") -> list[str]:
    """Every key of the deployment file, dotted, sections expanded."""
    keys = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys

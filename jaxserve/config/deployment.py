"""A deployment: which model, on which submeshes, in which formats, with which limits.

Read from one YAML file under `configs/`, with dotted overrides from the command line
(`--set attention.dp=3`) or from Python (`overrides={"attention.dp": 3}`). Everything is strict: an
unknown key is an error that names the nearest known one. Imports only `errors`.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from jaxserve.errors import ConfigError

Size = Annotated[int, Meta(ge=1, le=65536)]
Port = Annotated[int, Meta(ge=0, le=65535)]
OptionalPort = Annotated[int, Meta(ge=-1, le=65535)]
Weights = Literal["auto", "bfloat16", "float32", "fp8", "int8"]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Gigabytes = Annotated[float, Meta(ge=0, le=1e6)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the deployment file; unknown keys are errors."""


class AttentionRole(_Section, frozen=True):
    """The attention mesh: embedding, attention, KV cache, router, head and sampler."""

    dp: Size = 1
    """DP groups: each has its own page pool and sequences."""
    tp: Size = 1
    """Devices that share one DP group, split by query heads."""
    weights: Weights = "auto"
    """Format of the role's matrices. `auto`: as the checkpoint has them, FP8 blocks or `dtype`.
    Embedding, head, norms and router are never quantised."""
    memory_gb: Gigabytes = 0.0
    """What the deployment may use of a device, in 10^9 bytes; 0: what the devices report."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp


class FFNRole(_Section, frozen=True):
    """The ffn mesh: dense FFN, shared and routed experts."""

    ep: Size = 1
    """Expert parallelism: routed experts are divided over this axis."""
    tp: Size = 1
    """Tensor parallelism: every expert's d_ff is divided over this axis."""
    weights: Weights = "auto"
    """Format of the role's matrices, in colocated mode too."""
    expert_rows: Literal["auto", "blocks", "float"] = "auto"
    """What the routed experts' weights in 8 bits multiply. `auto`: FP8 the rows as they are, INT8
    rows in INT8 with a scale each; `blocks`: rows and hidden rows in the format of the weights,
    with a scale for every 128 columns, in FP8, of TPUs, only v7x; `float`: rows as they are, INT8
    too."""
    memory_gb: Gigabytes = 0.0
    """Likewise; in colocated mode `attention.memory_gb` counts."""

    @property
    def devices(self) -> int:
        return self.ep * self.tp


class Link(_Section, frozen=True):
    """How messages cross between the meshes."""

    dispatch: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Format of the tokens on the way to the ffn mesh (`auto`: the deployment's dtype). The
    combine returns rows in the deployment's dtype: BF16, or FP32 where dtype is float32."""
    route: Literal["trampoline", "broadcast"] = "trampoline"
    """`trampoline`: a token crosses once and the ffn mesh spreads it (xDeepServe §4.2);
    `broadcast`: every ffn device gets every token, attention sums the partial results (Step-3)."""
    transport: Literal["device_put", "ppermute"] = "device_put"


class Cache(_Section, frozen=True):
    """The paged KV cache of one DP group."""

    page_size: Size = 16
    """Tokens a page."""
    pages: Annotated[int, Meta(ge=1, le=2**30)] = 512
    """Pages a DP group, shared by its lanes."""
    format: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Of keys and values (`auto`: the deployment's dtype); 8 bits have a scale a token and head."""
    prefix: bool = True
    """Whether full pages are kept, while there is room, for requests that begin alike."""


class SchedulerLimits(_Section, frozen=True):
    """What a step may hold; these sizes fix the compiled buckets."""

    slots: Size = 8
    """Sequences a DP group and lane."""
    max_length: Annotated[int, Meta(ge=2, le=2**24)] = 1024
    """Longest sequence, prompt and output together, in tokens."""
    token_budget: Size = 128
    """Tokens a DP group and step (decode tokens first, then prefill chunks)."""
    token_buckets: list[Size] = []
    """Padded step sizes, ascending, the last equal to token_budget. Empty: slots and budget."""
    page_buckets: list[Size] = []
    """Padded pages a sequence, ascending, the last covering max_length. Empty: 1/4 and all."""
    prefill_tokens: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Most prefill tokens a DP group and step in which somebody decodes, so that tokens come at an
    even pace. 0: what decoding leaves of the budget."""
    max_waiting: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    """Requests that may wait for a slot before new ones are refused."""


SERVER_FILES = ("api_keys", "tls_certificate", "tls_key", "tls_client_ca")
"""Keys of the section `server` that name files."""


class Server(_Section, frozen=True):
    """Addresses and limits of the network faces."""

    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    """0: any free one."""
    http_port: OptionalPort = 8000
    """0: any free one; -1: no HTTP."""
    admin_port: OptionalPort = -1
    """HTTP for operators, on loopback only; likewise."""
    follower_grpc_port: OptionalPort = -1
    """Where processes other than 0 answer gRPC health and nothing else; 0: any free one; -1: none.
    Each host may have the same one; several processes of a host need 0."""
    follower_http_port: OptionalPort = -1
    """Likewise, /health and /ready."""
    drain_seconds: Seconds = 30.0
    """How long a SIGTERM waits for running requests."""
    request_seconds: Seconds = 3600.0
    """The longest that an HTTP request may run; gRPC's have the deadline that the client sets."""
    api_keys: str = ""
    """File with a key a line that clients have to show; relative to the YAML file. Empty: none."""
    tls_certificate: str = ""
    """PEM file, likewise relative; with `tls_key`, both faces speak TLS."""
    tls_key: str = ""
    tls_client_ca: str = ""
    """PEM file: clients need a certificate that it signed (mTLS)."""


class Cluster(_Section, frozen=True):
    """Deadlines between processes."""

    start_seconds: Seconds = 120.0
    step_seconds: Seconds = 30.0
    heartbeat_seconds: Seconds = 5.0


class Deployment(_Section, frozen=True):
    """Everything that one `serve` command needs to know."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json; relative to the YAML file."""
    ignored_model_keys: list[str] = []
    """Entries of config.json that are not known here and mean nothing for the mathematics."""
    mode: Literal["afd", "colocated"] = "afd"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations."""
    lanes: Annotated[int, Meta(ge=1, le=4)] = 1
    """Microbatches that are on their way at the same time."""
    attention: AttentionRole = AttentionRole()
    ffn: FFNRole = FFNRole()
    link: Link = Link()
    cache: Cache = Cache()
    scheduler: SchedulerLimits = SchedulerLimits()
    server: Server = Server()
    cluster: Cluster = Cluster()

    @property
    def dispatch_format(self) -> Literal["float32", "bfloat16", "fp8", "int8"]:
        """`link.dispatch` with `auto` resolved."""
        return self.dtype if self.link.dispatch == "auto" else self.link.dispatch

    @property
    def cache_format(self) -> Literal["float32", "bfloat16", "fp8", "int8"]:
        """`cache.format` with `auto` resolved."""
        return self.dtype if self.cache.format == "auto" else self.cache.format

    @property
    def devices(self) -> int:
        """Devices that the deployment takes."""
        colocated = self.mode == "colocated"
        return self.attention.devices + (0 if colocated else self.ffn.devices)


def load_deployment(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Deployment:
    """Reads a deployment file and applies dotted overrides.

    Args:
      path: the YAML file, or a model folder (then every other field has its default).
      overrides: `{"attention.dp": 3}` or `["attention.dp=3"]`; the latter's values are YAML.

    Raises:
      ConfigError: the file is missing, a key is unknown (names the nearest one), a value is out
        of range, or sizes do not fit each other.
    """
    path = Path(path)
    try:
        text = "" if path.is_dir() else path.read_text()
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
        tree["model"] = "."
    if isinstance(tree.get("model"), str):
        tree["model"] = str((base / tree["model"]).resolve())
    server = tree.get("server")
    if isinstance(server, dict):
        for key in SERVER_FILES:
            if isinstance(server.get(key), str) and server[key]:
                server[key] = str((base / server[key]).resolve())
    for key, value in _override_items(overrides):
        _set(tree, key, value)
    _check_keys(tree, Deployment, "")
    try:
        deployment = msgspec.convert(tree, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigError(f"deployment: {error}") from None
    return _complete(deployment)


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


def _complete(deployment: Deployment) -> Deployment:
    """Fills the derived buckets in and checks sizes against each other."""
    limits, cache = deployment.scheduler, deployment.cache
    if limits.token_budget < limits.slots:
        raise ConfigError(
            f"scheduler.token_budget = {limits.token_budget} is below scheduler.slots = "
            f"{limits.slots}: a step could not hold one token of every sequence"
        )
    for role in ("attention", "ffn"):
        weights = getattr(deployment, role).weights
        if weights in ("float32", "bfloat16") and weights != deployment.dtype:
            raise ConfigError(
                f"{role}.weights = {weights} is not dtype = {deployment.dtype}: weights are in "
                "that or in 8 bits"
            )
    longest = -(-limits.max_length // cache.page_size)
    page_buckets = limits.page_buckets or sorted({-(-longest // 4), longest})
    token_buckets = limits.token_buckets or sorted({limits.slots, limits.token_budget})
    for name, buckets, last, meaning in (
        ("token_buckets", token_buckets, limits.token_budget, "scheduler.token_budget"),
        ("page_buckets", page_buckets, longest, "ceil(scheduler.max_length / cache.page_size)"),
    ):
        if buckets != sorted(set(buckets)) or buckets[-1] != last:
            raise ConfigError(
                f"scheduler.{name} = {buckets}: must ascend and end at {meaning} = {last}"
            )
    if cache.pages < longest:
        raise ConfigError(
            f"cache.pages = {cache.pages} cannot hold one sequence of scheduler.max_length = "
            f"{limits.max_length} tokens: that takes {longest} pages of {cache.page_size}"
        )
    scheduler = msgspec.structs.replace(
        limits, token_buckets=token_buckets, page_buckets=page_buckets
    )
    return msgspec.structs.replace(deployment, scheduler=scheduler)

"""A deployment: which model, on which meshes, in which number formats, with which limits.

Read from one YAML file, with dotted overrides from the command line (`--set attention.dp=3`) or
from Python (`overrides={"attention.dp": 3}`). An unknown key is an error that names the nearest
known one. The docstring of every key is its entry in `configs/README.md` (`reference.py` writes
it). Imports only `errors`.
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
Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,62}$")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Gigabytes = Annotated[float, Meta(ge=0, le=1e6)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the deployment file; unknown keys are errors."""


class AttentionRole(_Section, frozen=True):
    """The attention mesh: embedding, attention, KV cache, router, head and sampler."""

    dp: Size = 1
    """DP groups; each has its own page pool and sequences."""
    tp: Size = 1
    """Devices of a DP group, which divide the query heads among them."""
    weights: Weights = "auto"
    """Format of the role's matrices: `auto` (as in the checkpoint: FP8 blocks or `dtype`),
    `bfloat16`, `float32`, `fp8`, `int8`. Embedding, head, norms and router are never quantised."""
    memory_gb: Gigabytes = 0.0
    """Memory that the deployment may use on each device, in 10^9 bytes; a deployment that needs
    more is refused. 0: what the devices report (CPUs report nothing)."""
    processes: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes that the role's devices are divided over; 0: as `--processes` leaves it."""
    runtime: Name = "main"
    """JAX runtime that the role lives in. Roles of one runtime share a `jax.distributed` group and
    are started together; a role of another one is started alone (`serve --role`)."""
    hardware: str = ""
    """What it runs on, a name of `configs/hardware`; for people and the planner."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp


class FFNRole(_Section, frozen=True):
    """The ffn mesh: dense FFN, shared and routed experts."""

    ep: Size = 1
    """Expert parallelism: number of devices over which the routed experts are divided."""
    tp: Size = 1
    """Tensor parallelism: number of devices over which every expert's d_ff is divided."""
    weights: Weights = "auto"
    """Format of the ffn role's matrices, in colocated mode too; values as of
    `attention.weights`."""
    expert_rows: Literal["auto", "blocks", "float"] = "auto"
    """Format of the rows that 8-bit routed experts multiply. `auto`: not quantised for FP8 weights,
    INT8 with one scale per row for INT8 weights; `blocks`: rows and hidden rows in the weights'
    format, with a scale for every 128 columns (FP8 on TPUs: v7x only); `float`: never quantised
    (W8A16)."""
    exchange: Literal["auto", "gather", "alltoall"] = "auto"
    """How rows get to the devices that hold their experts, in colocated mode too. `gather`: all
    rows to all devices, and sums back; `alltoall`: each row to the ep ranks (colocated: DP groups)
    that hold one of its experts, which need the whole shared expert, and one result from each
    back; `auto`: `alltoall` where it moves half the bytes or less."""
    memory_gb: Gigabytes = 0.0
    """Memory that the deployment may use on each ffn device, in 10^9 bytes; 0: what the devices
    report. In colocated mode `attention.memory_gb` counts."""
    processes: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes that the ffn role's devices are divided over; 0: as `--processes` leaves it."""
    runtime: Name = "main"
    """JAX runtime that the ffn role lives in; another one than attention's needs `link.transport:
    pull`, and the other way round."""
    hardware: str = ""
    """What the ffn role runs on, a name of `configs/hardware`; for people and the planner."""

    @property
    def devices(self) -> int:
        return self.ep * self.tp


class Link(_Section, frozen=True):
    """How messages cross between the meshes."""

    dispatch: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Format of the rows sent to the ffn mesh: `auto` (= `dtype`), `float32`, `bfloat16`, `fp8`,
    `int8`. Combine always returns rows in `dtype`."""
    route: Literal["trampoline", "broadcast"] = "trampoline"
    """`trampoline`: the ffn mesh brings a token to the devices that need it (xDeepServe §4.2);
    `broadcast`: to all of them (Step-3 §4.1), as `ffn.exchange: gather` does. Either way a token
    crosses between the meshes once."""
    transport: Literal["device_put", "ppermute", "pull"] = "device_put"
    """`device_put` and `ppermute` inside one runtime; `pull` between an attention runtime and an
    ffn runtime, either of which may be restarted while the other goes on."""
    addresses: list[str] = []
    """Where ffn workers of other runtimes listen, host:port, in order of preference: the first that
    is there is used, the others stand by."""
    absent_seconds: Seconds = 60.0
    """How long an attention worker waits with no ffn worker there before its requests fail."""


class Cache(_Section, frozen=True):
    """The paged KV cache of one DP group."""

    page_size: Size = 16
    """Tokens per page."""
    pages: Annotated[int, Meta(ge=1, le=2**30)] = 512
    """Pages per DP group, shared by its lanes."""
    format: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Format of keys and values: `auto` (= `dtype`), `float32`, `bfloat16`, or `fp8` and `int8`
    with one scale per token and head."""
    prefix: bool = True
    """Whether full pages are kept, while there is room, for later requests with the same prefix."""


class SchedulerLimits(_Section, frozen=True):
    """Limits of a step; they determine the compiled buckets."""

    slots: Size = 8
    """Sequences per DP group and lane."""
    max_length: Annotated[int, Meta(ge=2, le=2**24)] = 1024
    """Longest sequence, prompt and output together, in tokens."""
    token_budget: Size = 128
    """Tokens per DP group and step: decode tokens first, then prefill chunks."""
    token_buckets: list[Size] = []
    """Padded step sizes in tokens, ascending, the last equal to `token_budget`; more buckets mean
    less padding and a longer start. Empty: `slots` and `token_budget`."""
    page_buckets: list[Size] = []
    """Padded pages per sequence, ascending, the last covering `max_length`. Empty: a quarter of the
    longest and all of it."""
    prefill_tokens: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Most prefill tokens per DP group in a step that also decodes, which keeps the pace of tokens
    even. 0: what decoding leaves of the budget."""
    max_waiting: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    """Requests that may wait for a slot before new ones are refused."""


SERVER_FILES = ("api_keys", "tls_certificate", "tls_key", "tls_client_ca")
"""Keys of the section `server` that name files."""


class Server(_Section, frozen=True):
    """Addresses and limits of the network faces."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    grpc_port: Port = 50051
    """gRPC port; 0: any free one."""
    http_port: OptionalPort = 8000
    """HTTP port; 0: any free one; -1: no HTTP."""
    admin_port: OptionalPort = -1
    """HTTP port for operators, on loopback only; 0: any free one; -1: none."""
    follower_grpc_port: OptionalPort = -1
    """Port on which processes other than 0 answer gRPC health checks; 0: any free one, which
    several processes of a host need; -1: none."""
    follower_http_port: OptionalPort = -1
    """Port on which processes other than 0 answer `/health` and `/ready`; 0: any free one, which
    several processes of a host need; -1: none."""
    processes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Processes of their own for gRPC and HTTP, which share the ports; 0: threads of the engine's
    process, which is best for few streams. One suffices for some thousand streams."""
    drain_seconds: Seconds = 30.0
    """How long SIGTERM waits for running requests."""
    request_seconds: Seconds = 3600.0
    """Longest run time of an HTTP request; gRPC clients set their own deadline."""
    api_keys: str = ""
    """File with one key a line (at least 16 characters), one of which clients must present;
    relative to the YAML file. Empty: no keys."""
    tls_certificate: str = ""
    """PEM file, relative to the YAML file; with `tls_key`, gRPC and HTTP use TLS."""
    tls_key: str = ""
    """PEM file of the certificate's private key, relative to the YAML file."""
    tls_client_ca: str = ""
    """PEM file, relative to the YAML file; clients need a certificate signed by it (mTLS)."""


class Cluster(_Section, frozen=True):
    """Deadlines between processes."""

    start_seconds: Seconds = 120.0
    """For all processes to meet, and then the longest time in which one that loads or compiles may
    go without progress."""
    step_seconds: Seconds = 30.0
    """Deadline of a step."""
    heartbeat_seconds: Seconds = 5.0
    """Silence after which a process counts as dead."""


class Deployment(_Section, frozen=True):
    """Everything that a `serve` command reads from its deployment file."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json; relative to the YAML file."""
    ignored_model_keys: list[str] = []
    """Entries of the model's config.json that are unknown here but do not affect its mathematics;
    other unknown entries are refused."""
    mode: Literal["afd", "colocated"] = "afd"
    """`afd`: separate attention and ffn meshes; `colocated`: one mesh of the attention role's
    sizes, one program per step."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations: `bfloat16` or `float32`."""
    lanes: Annotated[int, Meta(ge=1, le=4)] = 1
    """Microbatches in flight at the same time."""
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
    expand_roles(tree)
    _check_keys(tree, Deployment, "")
    try:
        deployment = msgspec.convert(tree, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigError(f"deployment: {error}") from None
    return _complete(deployment)


def expand_roles(tree: dict[str, Any]) -> None:
    """Brings a file that lists roles and links into the form that has a section for each.

    `roles:` has the sections `attention` and `ffn`, or `colocated` alone; `links:` has `ffn`. They
    say the same as the short form's `attention`, `ffn`, `link` and `mode`.

    Raises:
      ConfigError: an unknown role or link, a section that is there in both forms, or a mode that is
        not that of the roles.
    """
    roles = _named_sections(tree, "roles", ("attention", "ffn", "colocated"))
    links = _named_sections(tree, "links", ("ffn",))
    if "colocated" in roles:
        if "attention" in roles:
            raise ConfigError("roles: attention and colocated are two ways to hold attention")
        roles["attention"] = roles.pop("colocated")
        sections, mode = roles, "colocated"
    else:
        missing = [name for name in ("attention", "ffn") if roles and name not in roles]
        if missing:
            raise ConfigError(f"roles: {missing[0]} is missing; expected attention and ffn")
        sections, mode = roles, "afd"
    if roles and tree.setdefault("mode", mode) != mode:
        raise ConfigError(f"mode = {tree['mode']}, but roles: {', '.join(roles)}")
    if "ffn" in links:
        sections = sections | {"link": links["ffn"]}
    for name, section in sections.items():
        if name in tree:
            raise ConfigError(
                f"{name}: is there twice, as a section of its own and in "
                f"{'links' if name == 'link' else 'roles'}"
            )
        tree[name] = section


def _named_sections(
    tree: dict[str, Any], key: str, known: Sequence[str]
) -> dict[str, dict[str, Any]]:
    sections = tree.pop(key, None) or {}
    if not isinstance(sections, dict):
        raise ConfigError(f"{key}: expected sections, got {sections!r}")
    for name in sections:
        if name not in known:
            raise ConfigError(f"unknown key {key}.{name!s}; known: {', '.join(known)}")
    return sections


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
    _check_runtimes(deployment)
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


def _check_runtimes(deployment: Deployment) -> None:
    """Raises ConfigError where roles, runtimes and transport contradict each other."""
    attention, ffn, link = deployment.attention, deployment.ffn, deployment.link
    pull = link.transport == "pull"
    if deployment.mode == "colocated":
        if pull:
            raise ConfigError("link.transport = pull: mode colocated has no link")
        return
    for name, role in (("attention", attention), ("ffn", ffn)):
        if role.processes and role.devices % role.processes:
            raise ConfigError(
                f"{name}.processes = {role.processes} does not divide the role's {role.devices} "
                "devices"
            )
        if pull and role.processes > 1:
            raise ConfigError(
                f"{name}.processes = {role.processes}: over link.transport = pull a worker has one "
                "process"
            )
    if pull != (attention.runtime != ffn.runtime):
        raise ConfigError(
            f"attention.runtime = {attention.runtime} and ffn.runtime = {ffn.runtime}, but "
            f"link.transport = {link.transport}: pull joins two runtimes, the others work inside "
            "one"
        )
    if pull and not link.addresses:
        raise ConfigError("link.addresses: empty; link.transport = pull needs those of ffn workers")
    if link.route == "broadcast" and ffn.exchange == "alltoall":
        raise ConfigError(
            "link.route = broadcast brings every token to every ffn device, and ffn.exchange = "
            "alltoall only to some"
        )
    if link.addresses and not pull:
        raise ConfigError(f"link.addresses: only with pull, not with {link.transport}")
    for place, address in enumerate(link.addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"link.addresses[{place}] = {address!r}: expected host:port")
        if address in link.addresses[:place]:
            raise ConfigError(f"link.addresses[{place}] = {address}: is there twice")

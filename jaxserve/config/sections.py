"""The sections of a deployment file about one worker: one struct each.

The docstring of every key is its entry in `docs/keys.md` (`reference.py` writes it).
`fleet_sections.py` has the sections about several workers. `deployment.py` puts all together, and
`checks.py` checks them against each other.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from jaxserve.config.formats import AskedFormat
from jaxserve.config.topology import TransportName

Size = Annotated[int, Meta(ge=1, le=65536)]
Port = Annotated[int, Meta(ge=0, le=65535)]
OptionalPort = Annotated[int, Meta(ge=-1, le=65535)]
Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,62}$")]
Layer = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Gigabytes = Annotated[float, Meta(ge=0, le=1e6)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the deployment file; unknown keys are errors."""


class AttentionRole(Section, frozen=True):
    """The attention mesh: embedding, attention, KV cache, router, head and sampler."""

    dp: Size = 1
    """DP groups; each has its own page pool and sequences. `auto`: with `tp` all devices of the
    process, where nothing of the cache is stored twice and a device has the fewest weights; on a
    CPU one group."""
    tp: Size = 1
    """Devices of a DP group, which divide the query heads among them. `auto`: as of `dp`; on a
    CPU its cores, at most as many as there are K and V heads, if a layer has 8 MB of weights for
    each."""
    weights: AskedFormat = "auto"
    """Format of the role's matrices: `auto` (as in the checkpoint: FP8 blocks, INT4 groups or
    `dtype`), `bfloat16`, `float32`, `fp8`, `int8`, `int4` (W4A16, a scale for every 128 columns, or
    groups as the checkpoint has them), `mxfp4` (E2M1 numbers, a power of two as the scale of every
    32 columns; W4A16). Embedding, head, norms and router are never quantised.
    Beside `dtype: float32` CPUs keep what is not quantised in BF16 where the checkpoint has it so,
    which changes no token, or where it says `bfloat16`; elsewhere that is refused, and `float32`
    beside `dtype: bfloat16` everywhere."""
    output: Literal["whole", "split"] = "whole"
    """Where attention's output projection is, the largest matrix of MLA and MFA. `whole`: every DP
    group has it. `split`: all devices of the mesh divide it; each then reads 1 / dp of it, and
    heads travel to its parts and sums back (xDeepServe, figure 10), which takes a fast link."""
    int8_products: Literal["none", "auto"] | list[Layer] = "none"
    """Layers whose attention multiplies in INT8 (xDeepServe §4.7), with `cache.format: int8` only:
    queries and probabilities are rounded to INT8, and keys and values are not converted. A list of
    their numbers, from 0; `auto`: those that `convert --int8-products` found to bear it, in
    `int8_products.json` beside the weights; `none`. The rotated part of latents is as `cache.rope`
    says; within a prompt's chunk latent attention stays in floats, and so do prediction modules.
    Colocated, each run of layers that differs from the one before is compiled for itself. On TPUs
    v5e and v6e (v7x has no INT8 products); plain XLA on GPUs."""
    memory_gb: Gigabytes = 0.0
    """Memory that the deployment may use on each device, in 10^9 bytes; a deployment that needs
    more, or more than the devices report, is refused. 0: what the devices report (CPUs report
    nothing). On GPUs JAX's memory pool gets this size, unless XLA_CLIENT_MEM_FRACTION is set."""
    processes: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes that the role's devices are divided over; 0: as `--processes` leaves it. They
    play no other role, unless this, `ffn.processes` and the number of all processes are the same:
    then each has its part of both roles."""
    runtime: Name = "main"
    """JAX runtime that the role lives in. Roles of one runtime share a `jax.distributed` group and
    are started together; a role of another one is started alone (`serve --role`)."""
    hardware: str = ""
    """Hardware of the role, a name of `configs/hardware`; for people, the planner, and `--check`,
    which says which programs have no kernel there."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp


class FFNRole(Section, frozen=True):
    """The ffn mesh: dense FFN, shared and routed experts."""

    ep: Size = 1
    """Expert parallelism: number of devices over which the routed experts are divided."""
    tp: Size = 1
    """Tensor parallelism: number of devices over which every expert's d_ff is divided."""
    weights: AskedFormat = "auto"
    """Format of the ffn role's matrices, in colocated mode too; values as of
    `attention.weights`."""
    expert_rows: Literal["auto", "blocks", "float"] = "auto"
    """Format of the rows that quantised routed experts multiply, and on Hopper GPUs a whole shared
    expert in FP8. `auto`: not quantised for INT4 weights, nor for FP8 ones but on Hopper GPUs,
    which do as in `blocks` (with `link.dispatch` = fp8: as the rows came over the wire), INT8 with
    one scale per row for INT8 weights; `blocks`: rows and hidden rows in the format of 8-bit
    weights, in INT8 for INT4 ones (W4A8), with a scale for every 128 columns (FP8 on TPUs: v7x
    only); `float`: never quantised (W8A16)."""
    exchange: Literal["auto", "gather", "alltoall"] = "auto"
    """How rows get to the devices that hold their experts, in colocated mode too. `gather`: all
    rows to all devices, and sums back; `alltoall`: each row to the ep ranks (colocated: DP groups)
    that hold one of its experts, which need the whole shared expert, and one result from each
    back; `auto`: `gather` on GPUs, elsewhere `alltoall` where it moves half the bytes or less. On
    GPUs `serve` first compares `alltoall` with `gather` on random rows; if that fails, `gather`
    takes its place, with a warning."""
    shrink: bool = False
    """Whether an ffn worker with a runtime of its own starts on the devices that are there where
    they are fewer than `ep` x `tp`, with fewer ep ranks, rather than not at all."""
    redundant_slots: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Slots of every ep rank (colocated: DP group) beyond those that its share of the routed
    experts takes: for replicas of busy experts, which `experts` moves there."""
    shared: Annotated[str, Meta(pattern=r"^(split|whole|ranks:[1-9]\d{0,4})$")] = "split"
    """Where the shared expert is. `split`: every device has a part of it, or with `alltoall` every
    rank all of it. `whole`: every ffn device (colocated: DP group) has all of it, for its own rows
    alone: more memory, and with `link.combine: int8` it runs while the routed experts' results are
    exchanged. `ranks:n`: the last n ep ranks (colocated: DP groups) hold it and no routed experts,
    and take turns with the rows (xDeepServe's EP 288 is 256 + 32); the others divide the routed
    experts, and its d_ff is a multiple of a routed expert's."""
    instances: Size = 1
    """Equal parts of the ep ranks, a host each, say. A message goes to each part, whose devices
    exchange its rows among themselves alone, and which answers with the sums over its own experts
    and part of the shared one's d_ff, for attention to add up: messages cross that many times, and
    nothing else leaves a part. Divides `ep`; inside one runtime attention's devices are a multiple
    of the ffn role's then, or with `pipeline: step` of a part's. Over `pull` each part is an ffn
    worker of its own, which may be lost and started again while the others answer; the first one
    has the shared experts, and dense layers take turns. A part gets the rows of its own experts
    alone if it usually needs at most half of all rows."""
    memory_gb: Gigabytes = 0.0
    """Memory that the deployment may use on each ffn device, in 10^9 bytes, as
    `attention.memory_gb`, which counts in colocated mode."""
    processes: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes that the ffn role's devices are divided over; 0: as `--processes` leaves it."""
    runtime: Name = "main"
    """JAX runtime that the ffn role lives in; another one than attention's needs `link.transport:
    pull`, and the other way round."""
    hardware: str = ""
    """Hardware of the ffn role, a name of `configs/hardware`; for people, the planner, and
    `--check`, which says which programs have no kernel there. Empty: attention's."""

    @property
    def shared_ranks(self) -> int:
        """Number of ranks with the shared expert alone; 0: there are none."""
        return int(self.shared.removeprefix("ranks:")) if self.shared.startswith("ranks:") else 0

    @property
    def devices(self) -> int:
        return self.ep * self.tp


class Link(Section, frozen=True):
    """Messages between the meshes."""

    dispatch: AskedFormat = "auto"
    """Format of the rows sent to the ffn mesh: `auto` (= `dtype`), `float32`, `bfloat16`, `fp8`,
    `int8`."""
    combine: Literal["auto", "int8"] = "auto"
    """Format of the FFN's results on their way back, between the roles and, before they are
    summed, between the devices that hold experts: `auto` (= `dtype`), or `int8` with a scale a row
    (xDeepServe §4.7). Sums are FP32 either way; `ffn.tp` devices with the same rows (colocated)
    add theirs up in `dtype`."""
    route: Literal["trampoline", "broadcast"] = "trampoline"
    """`trampoline`: the ffn mesh brings a token to the devices that need it (xDeepServe §4.2);
    `broadcast`: to all of them (Step-3 §4.1), as `ffn.exchange: gather` does. Either way a token
    crosses between the meshes once."""
    transport: TransportName = "auto"
    """`device_put` and `ppermute` inside one runtime; `pull` between an attention runtime and an
    ffn runtime, either of which may be restarted while the other goes on. `auto`: `ppermute`
    between hosts and slices of TPUs, else `device_put`. There `serve` first times `device_put`; if
    it is far slower than `ppermute`, that takes its place, with a warning."""
    addresses: list[str] = []
    """Where ffn workers of other runtimes listen, host:port, in order of preference: the first that
    is there is used, the others stand by. With `ffn.processes` each process has an address; those
    of a worker follow each other. With `ffn.instances` workers of the instances take turns: first
    one of each, then their standbys."""
    batching: Literal["rotation", "merge", "cohort"] = "cohort"
    """Messages of several attention workers that an ffn worker of another runtime runs in one pass,
    as many as its memory allows, and at most `domains` with several `ffn.processes`. `rotation`:
    one; `merge`: those of a layer that wait; `cohort`: those of lanes that keep in step, for which
    the worker waits as long as that pays."""
    absent_seconds: Seconds = 60.0
    """How long an attention worker waits with no ffn worker there before its requests fail."""


class Cache(Section, frozen=True):
    """The paged KV cache of one DP group."""

    page_size: Size = 16
    """Tokens per page. `auto`: 64, on CPUs 16, on TPUs 128, or 256 with 8 bits."""
    pages: Annotated[int, Meta(ge=1, le=2**30)] = 512
    """Pages per DP group, shared by its lanes. `auto`: what fits beside weights and activations, no
    more than twice what all slots can fill; on CPUs 1,024 tokens a slot, or one longest sequence,
    in half of the host's free memory."""
    format: AskedFormat = "auto"
    """Format of keys and values: `auto` (= `dtype`), `float32`, `bfloat16`, or `fp8` and `int8`
    with one scale per token and head. Nothing reads INT4, which is refused."""
    rope: Literal["auto", "bfloat16"] = "auto"
    """Format of the rotated part of latent attention's rows where `format` has 8 bits: `auto`: that
    of the rest, under the same scale; `bfloat16`: in an array of its own, not quantised (xDeepServe
    §4.7), for which GPUs have no kernel."""
    prefix: bool = True
    """Whether full pages are kept, while there is room, for later requests with the same prefix."""
    host_gb: Gigabytes = 0.0
    """Host memory in GB for pages that leave the prefix caches; they come back when a request needs
    them. Where processes share the attention mesh it is that of the first one. 0: such pages are
    lost. For models in which some layer has no window."""
    storage: Annotated[str, Meta(pattern="^((/|gs://.|s3://.).*)?$")] = ""
    """Absolute path of a folder for pages, or the URL of one in a bucket (`gs://…`, `s3://…`), with
    `host_gb`: those of ended requests and those that leave the device. They are found after a
    restart and by all workers with the folder, for the same weights and formats, also after a reset
    of the prefix cache, which empties memory alone. Writers of the folder can change answers.
    Empty: none."""
    storage_gb: Annotated[float, Meta(ge=1, le=1e6)] = 100.0
    """Most GB of pages in `storage`, of all models and workers; the least recently used leave. In a
    bucket pages stay until a rule of the bucket deletes them."""


class SchedulerLimits(Section, frozen=True):
    """Limits of a step; they determine the compiled buckets."""

    slots: Size = 8
    """Sequences per DP group and lane. `auto`: as many of 4,096 tokens as fit, 8 to 256; on CPUs
    32; at most half of a written `token_budget`, or a written bucket below that."""
    max_length: Annotated[int, Meta(ge=2, le=2**24)] = 1024
    """Longest sequence, prompt and output together, in tokens. `auto`: the model's positions, what
    fits, or what written `page_buckets` hold."""
    token_budget: Size = 128
    """Tokens per DP group and step: decode tokens first, then prefill chunks. `auto`: the last of
    written `token_buckets`, else 512, on CPUs 128 where a token meets more than 25 M parameters a
    core, and at least what decoding takes."""
    token_buckets: list[Size] = []
    """Padded step sizes in tokens, ascending, the last equal to `token_budget`; more buckets mean
    less padding and a longer start. Steps of fewer tokens than `slots` have no requests with
    penalties, biases, grammars or log-probabilities. `auto` or empty: `slots` and `token_budget`;
    on CPUs also 1, 8 and 128."""
    page_buckets: list[Size] = []
    """Padded pages per sequence, ascending, the last covering `max_length`. `auto` or empty: those
    of the longest, and quarters of it down to 1,024 tokens; on CPUs the longest alone."""
    prefill_tokens: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Most prefill tokens per DP group in a step that also decodes, which keeps the pace of tokens
    even. 0: what decoding leaves of the budget."""
    token_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    """Milliseconds between two tokens of a sequence that chunks of prompts beside it may cause. A
    step that decodes takes the largest of `token_buckets` whose measured time keeps it, or the
    smallest. Lanes and domains of a runtime take turns, so a step has their share. 0: any."""
    spread: bool = False
    """Whether chunks of a prompt longer than `token_budget` are divided over DP groups (sequence
    parallelism): over one group for each budget that the prompt fills, as far as they have room for
    a copy of its pages, with the tokens that their own requests leave. Not for models with
    compressed rows or states. Compiles the largest step once more for each of `page_buckets`."""
    compile_first: Literal["few", "all"] = "all"
    """Programs that are compiled before the start. `few`: those of the smallest step that has room
    for the tokens of every sequence, drafts included. Until their own are compiled, all steps use
    these, so prompts are computed in smaller chunks, and requests with penalties, biases, grammars
    or log-probabilities wait for theirs while others overtake them. Only for `mode: colocated` in
    one process, elsewhere all. `auto`: `few` there on CPUs, with `token_buckets: auto`."""
    max_waiting: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    """Requests that may wait for a slot before new ones are refused."""


SERVER_FILES = ("api_keys", "tls_certificate", "tls_key", "tls_client_ca")
"""Keys of the section `server` that name files."""


MIN_SECRET_CHARACTERS = 16
"""Length of API keys, and of the secret that processes show each other."""


class Server(Section, frozen=True):
    """Addresses and limits of the network faces."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    grpc_port: Port = 50051
    """gRPC port; 0: any free one."""
    http_port: OptionalPort = 8000
    """HTTP port; 0: any free one; -1: no HTTP."""
    http_socket: str = ""
    """Path of a Unix socket on which HTTP listens instead of `http_port`, for a proxy on this host;
    its file is for user and group of the process. Needs `processes: 0`. Empty: none."""
    admin_port: OptionalPort = -1
    """HTTP port for operators, on loopback only; 0: any free one; -1: none."""
    follower_grpc_port: OptionalPort = -1
    """Port on which processes without clients (followers, workers of a fleet, ffn workers) answer
    gRPC health checks; 0: any free one, which several processes of a host need; -1: none."""
    follower_http_port: OptionalPort = -1
    """Port on which processes without clients answer `/health`, `/ready` and `/metrics`; 0: any
    free one, which several processes of a host need; -1: none."""
    traces: str = ""
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, as `http://HOST:4318`: every
    process sends it spans of its part of each request. Needs `jaxserve[tracing]`; OpenTelemetry's
    `OTEL_` variables set sampling, headers and names. Empty: nothing is traced."""
    model_names: Annotated[list[str], Meta(max_length=16)] = []
    """Names that HTTP clients may use for the model; answers to requests without a name have the
    first. Empty: the name of the model's folder."""
    cors_origins: Annotated[list[str], Meta(max_length=64)] = []
    """Origins, `https://host:port`, whose web pages may call over HTTP and read the answers; `*`:
    all. Empty: none but the server's own page."""
    request_templates: bool = False
    """Whether requests may bring a chat template of their own (`chat_template`). It runs with
    limits, but takes time of the process that renders for all."""
    unknown_fields: Literal["warn", "refuse"] = "warn"
    """Fields of HTTP requests that this server does not know: they are left out, and the log names
    each once; or the request is refused. Fields of other servers that would change the answer are
    always refused, by name."""
    processes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Processes of their own for gRPC and HTTP, which share the ports; 0: threads of the engine's
    process, which is best for few streams. One suffices for some thousand streams."""
    drain_seconds: Seconds = 30.0
    """How long SIGTERM waits for running requests."""
    wait_seconds: Annotated[float, Meta(ge=0, le=86400)] = 15.0
    """A request that would wait longer for its first token, by an estimate from what was measured,
    is refused at once (429, or RESOURCE_EXHAUSTED) with the estimate; those whose `priority` is
    served earlier last. 0: none is refused for that."""
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
    open: bool = False
    """Whether a `host` that others can reach may take requests from everybody. Otherwise it needs
    `api_keys` or `tls_client_ca`: TLS alone admits every client."""


class Cluster(Section, frozen=True):
    """Deadlines between processes."""

    start_seconds: Seconds = 1800.0
    """Longest time without progress before the deployment is ready: no further process comes, or
    one that loads or compiles does not advance. The log names the processes that are waited for
    every 10 seconds."""
    ports: Annotated[str, Meta(pattern="^([1-9][0-9]{0,4}-[1-9][0-9]{0,4})?$")] = ""
    """Ports `FIRST-LAST` of every process for what no other key or flag names: plans that are
    handed on, hand-offs of pages, the servers of JAX's transfers. Firewalls must let them through.
    Empty: the system chooses."""
    tls: str = ""
    """Folder with `ca.crt`, `tls.crt` and `tls.key` (PEM, as Kubernetes' TLS Secrets have them),
    relative to the YAML file: connections between processes are encrypted, and each end shows a
    certificate that `ca.crt` has signed. JAX's own services and collectives are not covered."""
    step_seconds: Seconds = 30.0
    """Deadline of a step."""
    heartbeat_seconds: Seconds = 5.0
    """Silence after which a process counts as dead. After 0.3 of it (at least 1.25 seconds) it is
    suspect: named in log, metrics and `/health`, and given nothing new."""

    @property
    def suspect_seconds(self) -> float:
        """Silence after which a process is suspect; signs of life come twice a second."""
        return max(1.25, 0.3 * self.heartbeat_seconds)

    def silence_seconds(self, ready: bool) -> float:
        """Silence after which a process counts as lost. Before it is ready it may hold the
        interpreter for long, because it loads and compiles."""
        return 2 * self.heartbeat_seconds if ready else self.meeting_seconds

    @property
    def meeting_seconds(self) -> float:
        """Longest wait for a process that is known to run."""
        return min(self.start_seconds, 120.0)


class Speculative(Section, frozen=True):
    """Drafts: tokens that are proposed cheaply, and verified several at a time. They change no
    token, sampled ones included."""

    method: Literal["none", "ngram", "mtp"] = "none"
    """Where drafts come from. `ngram`: what followed in a sequence where its last tokens came
    before (prompt lookup). `mtp`: the checkpoint's modules of multi-token prediction."""
    drafts: Annotated[int, Meta(ge=1, le=8)] = 3
    """Most drafts of a sequence and step; a step then takes up to 1 + `speculative.drafts` tokens
    of each."""
    modules: Size = 1
    """With `mtp`: modules that are loaded. Each makes one draft, and the last one all further
    ones."""
    automatic: bool = True
    """Whether steps have drafts only where they are faster with them, by what steps took and how
    many drafts held lately; else all have."""


class Experts(Section, frozen=True):
    """Routed experts that move to ranks with less work."""

    window_seconds: Seconds = 60.0
    """How often it is read what every expert got."""
    rebalance_seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """How often it is decided whether experts move; 0: only when `POST /experts/rebalance` on the
    admin port asks for it."""
    least_gain: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Part of its tokens that the busiest rank of a layer must lose, or the layer stays as it
    is."""
    move_gb_per_second: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Rate of moves in 10^9 bytes of weights a second, so that steps are not disturbed."""
    move_mb_per_step: Annotated[float, Meta(gt=0, le=1e6)] = 4.0
    """Most of an expert, in 10^6 bytes, that a device gets between two steps; an expert that is
    larger comes in pieces."""
    source: Literal["devices", "checkpoint", "peer"] = "devices"
    """Where experts that move come from: `devices` that have them; the `checkpoint`, of which every
    device reads its own share of one expert at a time; or a `peer`, a running worker of
    `weights.peers`, and the checkpoint where none has it. With several processes steps wait for
    what is read."""

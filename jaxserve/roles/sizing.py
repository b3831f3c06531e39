"""Values for the open keys of a deployment (`config/auto.py`), from the model and the devices.

The arithmetic is that of `capacity.py`: weights and activations first, then pages in the rest of
the memory. The counts of a model's parameters come from its templates. Called by `fleet/sizing.py`,
which knows the devices; starts no backend, reads no files.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.auto import AUTO_KEYS, page_tokens
from jaxserve.config.checks import step_refusal
from jaxserve.config.deployment import Deployment, scratch_pages
from jaxserve.config.model import ModelConfig, Platform
from jaxserve.config.sections import SchedulerLimits
from jaxserve.errors import ConfigError
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.module import Template
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.both_roles import refusal
from jaxserve.roles.capacity import GB, RoleBytes, changed
from jaxserve.roles.pipelines import role_bytes


class Parameters(NamedTuple):
    """Parameter counts of a text model, without scales and zero points."""

    total: int
    """All parameters but those of multi-token prediction; a tied head counts once."""
    activated: int
    """Parameters that take part in computing one token: all but the embedding, of which it reads
    one row, and the experts that it is not routed to."""
    prediction: int
    """Parameters of the prediction modules (DeepSeek-V3 §2.2), each with a layer, a projection to
    it, and norms; they share embedding and head."""


def count_parameters(config: ModelConfig) -> Parameters:
    """Returns the model's parameter counts, which do not depend on number formats."""
    # For one device in each role, with all prediction modules, without padding and scales.
    plain = msgspec.structs.replace(config, stored="plain", modules=len(config.predictors))
    one = Deployment(model="", scheduler=SchedulerLimits(max_length=2))
    templates = ModelTemplates(plain, one, AbstractSubmeshes(one))
    embedding, head = _size(templates.embedding), _size(templates.head)
    if config.tied_head:
        head -= config.d_model * config.vocab
    total, activated = embedding + head, head + (embedding if config.tied_head else 0)
    for kind in config.decoder:
        for template in (templates.attention[kind], templates.ffn[kind.ffn]):
            total += _size(template)
            activated += _size(template, config.top_k, config.experts)
    predicting = (
        block
        for kind in config.predictors
        for block in (templates.attention[kind], templates.ffn[kind.ffn], templates.prediction)
    )
    return Parameters(total, activated, sum(map(_size, predicting)))


def attention_cost(config: ModelConfig, platform: str, chunk: int) -> float:
    """Returns what attention adds to the cost of a prompt of n tokens, over n², where the n tokens'
    linear maps cost n, by FLOPs.

    A token meets half of the prompt on the mean, and takes two FLOPs for each number of a key, and
    of a value. Windows, states and chosen rows are as long in every prompt; the scores by which an
    indexer chooses are not, and are without values. Long chunks of latent attention, except on
    TPUs, attend to expanded keys and values: each chunk expands all tokens before it again.

    Args:
      platform: of the worker, as JAX names it.
      chunk: tokens of a DP group's step.
    """
    numbers = 0.0
    for kind in config.decoder:
        spec, expansion = kind.attention, kind.attention.expansion
        met = spec.pair_flops / 4
        if expansion and platform != "tpu" and chunk >= expansion.least:
            met = expansion.width / 2 + expansion.products / (2 * chunk)
        if spec.indexer:
            indexer = spec.own_indexer
            met = indexer.heads * indexer.head_dim / 2 if indexer else 0
        if spec.every or not spec.window:
            numbers += met * spec.rows_a_token
    return numbers / count_parameters(config).activated


def _size(template: Template, used: int = 1, experts: int = 1) -> int:
    """Returns the number of a template's parameters; of experts, those of the used ones."""
    sizes = ((math.prod(leaf.shape), leaf.of_slots) for leaf in template.leaves)
    return sum(size * used // experts if of_slots else size for size, of_slots in sizes)


HOST_PART, DEVICE_PART = 0.5, 0.9
"""Part of a host's free memory, or of the memory that an accelerator reports, for a deployment. The
compiler has the rest, and on a host all other processes."""
USUAL_TOKENS = 4096
"""Length of the sequences for which slots are counted; CPUs, which are slow, `CPU_USUAL_TOKENS`."""
CPU_USUAL_TOKENS = 1024
CPU_SLOTS, LEAST_SLOTS, MOST_SLOTS = 32, 8, 256
CPU_TOKEN_BUDGET, TOKEN_BUDGET = 128, 512
CPU_CHUNK_PARAMETERS = 25_000_000
"""Parameters a token and core with which a CPU computes a chunk of `TOKEN_BUDGET` tokens in a
quarter of a second, at 100 GFLOP/s a core. Decoding requests wait no longer for a chunk."""
CPU_SMALL_STEPS = (1, 8)
"""Tokens of steps with fewer sequences than slots; each takes some seconds to compile."""
CPU_LAYER_BYTES = 8_000_000
"""Weights of a layer for each core that takes part in it: half a millisecond, at what a core of a
server reads, beside the 0.1 ms that collectives between two cores take."""
SMALLEST_PAGES = 1024
"""Tokens of the smallest page bucket on accelerators."""
AFD_KEYS = frozenset(
    ("ffn.ep", "ffn.tp", "ffn.shared", "link.transport", "link.route", "link.dispatch")
)
"""Keys that only separate meshes have; a file with such a key means them."""


class UsableDevices(NamedTuple):
    """The devices that a process may use for a deployment."""

    platform: Platform
    devices: int
    """On a CPU the cores, each of which can be a device."""
    memory: int | None
    """Bytes of each device that the deployment may use, on a CPU of all together; None: unknown."""


class SizeChoice(NamedTuple):
    """The value chosen for an open key, and why."""

    value: Any
    reason: str


def choose_sizes(
    config: ModelConfig, deployment: Deployment, written: frozenset[str], machine: UsableDevices
) -> dict[str, SizeChoice]:
    """Values for the open keys of a deployment that one process has to itself.

    Args:
      deployment: with the structs' defaults in open keys.
      written: the dotted keys that are not open. They keep their values, and open keys are chosen
        to fit them.

    Raises:
      ConfigError: the model cannot be cut as written keys ask.
    """
    return _Sizes(config, deployment, written, machine).choose()


class _Sizes:
    """Chooses key after key; each choice sees the ones before."""

    def __init__(
        self,
        config: ModelConfig,
        deployment: Deployment,
        written: frozenset[str],
        machine: UsableDevices,
    ):
        self._written, self._machine = written, machine
        self._now = deployment
        self._found: dict[str, SizeChoice] = {}
        self._on_cpu = machine.platform == "cpu"
        self._config = msgspec.structs.replace(config, platform=machine.platform)
        self._kv_heads = min(attention.kv_heads for attention in config.attentions())

    def choose(self) -> dict[str, SizeChoice]:
        """All choices, in the order of `AUTO_KEYS`."""
        self._step_sizes()
        self._formats()
        self._layout()
        self._chunk()
        self._room()
        self._buckets()
        self._pipeline()
        return {key: self._found[key] for key in AUTO_KEYS if key in self._found}

    def _set(self, key: str, value: Any, reason: str) -> None:
        """Chooses a value, unless the key is written."""
        if key in self._written:
            return
        self._found[key] = SizeChoice(value, reason)
        self._now = changed(self._now, key, value)

    def _formats(self) -> None:
        split = sorted(self._written & AFD_KEYS)
        if split:
            self._set("mode", "afd", f"{split[0]} is of separate meshes")
        else:
            self._set("mode", "colocated", "one program a step; AFD is planned: jaxserve plan")
        asked = {self._now.attention.weights, self._now.ffn.weights} & {"bfloat16", "float32"}
        if "float32" in asked or (asked and not self._on_cpu):
            self._set("dtype", max(asked), "that of the weights")
        elif self._on_cpu:
            self._set("dtype", "float32", "which CPUs multiply faster than bfloat16")
            memory = self._memory(self._now)
            if memory is not None and sum(p.total for p in self._parts(self._now)) > memory:
                self._set("dtype", "bfloat16", "float32 does not fit into the host's memory")
        else:
            self._set("dtype", "bfloat16", "which the device multiplies fastest")

    def _step_sizes(self) -> None:
        """First values of the sizes that `_room` may reduce."""
        platform, unit = self._machine.platform, self._config.page_unit
        size = page_tokens(platform, self._now.cache_format, unit)
        self._set("cache.page_size", size, "tokens that kernels read at a time")
        self._set("scheduler.max_length", self._config.max_positions, "the model's positions")
        self._follow_buckets()
        if self._on_cpu:
            most = self._most_slots()
            why = "beyond, a CPU gains little" if most >= CPU_SLOTS else "prompts have the rest"
            self._set("scheduler.slots", min(CPU_SLOTS, most), why)
            least, reason = CPU_TOKEN_BUDGET, "a prompt's chunk that a CPU computes at a time"
        else:
            least, reason = TOKEN_BUDGET, "a prompt's chunk that keeps a device busy"
        self._budget(least, reason)

    def _budget(self, least: int, reason: str) -> None:
        """A step takes at least these tokens, and the drafts of all slots."""
        decoded = self._now.scheduler.slots * (1 + self._now.drafts)
        self._set("scheduler.token_budget", max(least, decoded), reason)

    def _follow_buckets(self) -> None:
        """Chooses the sizes at which written buckets have to end; nothing later changes them."""
        limits = self._now.scheduler
        if "scheduler.token_buckets" in self._written:
            budget = limits.token_buckets[-1]
            self._set("scheduler.token_budget", budget, "the last of scheduler.token_buckets")
            self._written |= {"scheduler.token_budget"}
        if "scheduler.page_buckets" in self._written:
            pages, size = limits.page_buckets[-1], self._now.cache.page_size
            if "scheduler.max_length" in self._written:
                size *= -(-limits.max_length // (pages * size))
                self._set("cache.page_size", size, f"{pages} hold scheduler.max_length")
            tokens = min(pages * size, limits.max_length)
            self._set("scheduler.max_length", tokens, "that of scheduler.page_buckets")
            self._written |= {"scheduler.max_length"}

    def _most_slots(self) -> int:
        """Slots whose decode steps leave half of a written budget for prompts' chunks, and fill a
        written bucket where one is small enough."""
        if "scheduler.token_budget" not in self._written:
            return MOST_SLOTS
        limits = self._now.scheduler
        half = limits.token_budget // 2
        tokens = max((size for size in limits.token_buckets if size <= half), default=half)
        return min(MOST_SLOTS, max(1, tokens // (1 + self._now.drafts)))

    def _layout(self) -> None:
        """Attention's axes: all devices, nothing of the cache stored twice, weights divided most.

        A decode step reads the weights of a device once, so few weights a device are best. More tp
        divides them as long as K and V heads are not copied; dp divides the experts.
        """
        if self._now.topology.has("ffn"):
            return
        best = min(self._layouts(), key=lambda one: self._rank(*one), default=None)
        if best is None:
            return  # building the roles says why
        (dp, tp), part = best
        heads = self._kv_heads
        of_all = f"{dp * tp} of {self._machine.devices} {'cores' if self._on_cpu else 'devices'}"
        reason = (
            f"{of_all}, weights {part.weights / GB:.2f} GB on each, "
            f"{heads} K and V head{'s' if heads > 1 else ''}"
        )
        self._set("attention.dp", dp, reason)
        self._set("attention.tp", tp, reason)

    def _chunk(self) -> None:
        """On a CPU a longer chunk of a prompt, where it does not hold decoding up."""
        if not self._on_cpu:
            return
        met, cores = count_parameters(self._config).activated, self._now.attention.devices
        if met <= CPU_CHUNK_PARAMETERS * cores:
            self._budget(TOKEN_BUDGET, "a prompt's chunk of a quarter of a second")

    def _layouts(self) -> Iterator[tuple[tuple[int, int], RoleBytes]]:
        """For each tp the largest dp into which the model can be cut, and a device's bytes."""
        own = self._now.attention
        most = max(self._machine.devices, 1)
        if self._on_cpu:
            most = self._useful_cores(most)
        powers = [1 << exponent for exponent in range(most.bit_length())]
        for tp in [own.tp] if "attention.tp" in self._written else powers:
            free = range(1 if self._on_cpu else max(most // tp, 1), 0, -1)
            for dp in [own.dp] if "attention.dp" in self._written else free:
                tried = changed(changed(self._now, "attention.dp", dp), "attention.tp", tp)
                if parts := self._parts(tried):
                    yield (dp, tp), parts[0]
                    break

    def _useful_cores(self, cores: int) -> int:
        """Cores that share every layer: XLA computes much of a step on one thread a device."""
        parts = self._parts(self._now)
        if not parts:
            return 1
        layer = parts[0].weights * parts[0].devices // self._config.all_layers
        return max(1, min(cores, self._kv_heads, layer // CPU_LAYER_BYTES))

    def _rank(self, layout: tuple[int, int], part: RoleBytes) -> tuple[float, ...]:
        """Smaller is better."""
        dp, tp = layout
        memory = self._memory(self._now, dp * tp)
        over = 0 if memory is None else max(0, part.total - memory)
        copies = max(1, tp // self._kv_heads)
        return over, -dp * tp, copies, part.weights, tp

    def _room(self) -> None:
        """Pages in what weights and activations leave; slots, and the longest sequence, by them."""
        limits = self._now.scheduler
        usual = CPU_USUAL_TOKENS if self._on_cpu else USUAL_TOKENS
        if "scheduler.slots" not in self._written and not self._on_cpu:
            sequence = min(limits.max_length, usual)
            most = self._most_slots()
            halves = (most >> times for times in range(most.bit_length()))
            for slots in (one for one in halves if one >= min(most, LEAST_SLOTS)):
                self._set(
                    "scheduler.slots",
                    slots,
                    f"{slots * self._now.lanes} sequences of {sequence} tokens fit a DP group",
                )
                self._budget(TOKEN_BUDGET, "decode first, then prompts' chunks")
                pages = self._pages_that_fit()
                if pages is None or pages * self._now.cache.page_size >= slots * sequence:
                    break
        self._pages(self._pages_that_fit(), usual)

    def _pages(self, fit: int | None, usual: int) -> None:
        limits, size = self._now.scheduler, self._now.cache.page_size
        scratch = scratch_pages(self._now.drafts, self._now.modules)
        sequences = limits.slots * self._now.lanes
        held = self._now.cache.pages if "cache.pages" in self._written else fit
        if held is not None and 2 <= (tokens := (held - scratch) * size) < limits.max_length:
            reason = f"what {held} pages hold, of the model's {limits.max_length} positions"
            self._set("scheduler.max_length", tokens, reason)
        longest = -(-self._now.scheduler.max_length // size)
        if self._on_cpu or fit is None:
            wanted = max(longest, sequences * min(longest, -(-usual // size))) + scratch
            reason = f"{sequences} sequences of {min(usual, longest * size)} tokens, or a longest"
        else:
            wanted = 2 * sequences * longest + scratch
            reason = f"{sequences} longest sequences, and as many prefixes"
        if fit is not None and fit < wanted:
            wanted, reason = max(fit, longest + scratch), self._arithmetic()
        self._set("cache.pages", wanted, reason)

    def _pages_that_fit(self) -> int | None:
        """None: the memory is not known, or the model cannot be cut."""
        room = self._room_of_pages()
        return None if room is None else max(0, (room[0] - room[1]) // room[2])

    def _room_of_pages(self) -> tuple[int, int, int] | None:
        """Bytes that the deployment may use of an attention device, bytes of everything but pages
        there, and bytes of a page."""
        many, memory = 1 << 12, self._memory(self._now)
        parts = self._parts(self._now, many)
        if memory is None or not parts:
            return None
        return memory, parts[0].total - parts[0].cache, max(1, parts[0].cache // many)

    def _arithmetic(self) -> str:
        room = self._room_of_pages()
        assert room is not None
        memory, rest, page = room
        return (
            f"({memory / GB:.2f} GB - {rest / GB:.2f} GB of weights and activations) / "
            f"{page / 1e6:.3f} MB a page"
        )

    def _memory(self, deployment: Deployment, devices: int = 0) -> int | None:
        """Returns the bytes of a device that the deployment may use. `devices` share a CPU's
        memory; 0: those of the deployment."""
        if written := round(deployment.attention.memory_gb * GB):
            return written
        memory = self._machine.memory
        if memory is None or not self._on_cpu or deployment.topology.has("ffn"):
            return memory
        return memory // (devices or deployment.attention.dp * deployment.attention.tp)

    def _parts(self, deployment: Deployment, pages: int = 1) -> tuple[RoleBytes, ...]:
        """Bytes of the roles with these pages; empty: the model cannot be cut so."""
        try:
            return role_bytes(self._config, changed(deployment, "cache.pages", pages))
        except (ConfigError, ValueError):
            return ()

    def _buckets(self) -> None:
        """Small steps for few sequences where padding costs time: on CPUs."""
        limits = self._now.scheduler
        drafted = limits.slots * (1 + self._now.drafts)
        sizes = {limits.slots, drafted, limits.token_budget}
        reason = "slots, and the budget"
        if self._on_cpu and not self._now.drafts:
            sizes |= {size for size in CPU_SMALL_STEPS if size < limits.slots}
            sizes |= {size for size in (CPU_TOKEN_BUDGET,) if drafted < size < limits.token_budget}
            reason = "small ones for few sequences, slots, and the budget"
        self._set("scheduler.token_buckets", sorted(sizes), reason)
        longest = -(-limits.max_length // self._now.cache.page_size)
        if self._on_cpu:
            self._set("scheduler.page_buckets", [longest], "attention stops at the longest there")
            if self._now.topology.has("colocated") and "scheduler.token_buckets" in self._found:
                self._set("scheduler.compile_first", "few", "the others while it serves")
            return
        pages, least = {longest}, max(1, SMALLEST_PAGES // self._now.cache.page_size)
        while (size := min(pages) // 4) >= least:
            pages.add(size)
        self._set("scheduler.page_buckets", sorted(pages), "quarters of the longest sequence")

    def _pipeline(self) -> None:
        """Whole steps of one lane, if all devices are cores of one host: the roles share them, so
        that stages gain nothing beside each other. Each device then has the bytes of both roles.
        Programs of several lanes take long to compile."""
        if not self._on_cpu or self._now.topology.has("colocated") or self._now.lanes > 1:
            return
        tried = changed(self._now, "pipeline", "step")
        memory, parts = self._machine.memory, self._parts(tried, self._now.cache.pages)
        if not parts or refusal(tried) or step_refusal(tried):
            return
        if memory is None or 2 * sum(part.total * part.devices for part in parts) <= memory:
            self._set("pipeline", "step", "one process of CPU devices: stages would share cores")

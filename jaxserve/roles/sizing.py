"""What a deployment leaves open (`config/auto.py`), from the model and the devices: arithmetic.

It is that of `capacity.py`: bytes of weights and activations first, pages in what they leave.
Called by `fleet/sizing.py`, which knows the devices; starts no backend, reads no files.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from jaxserve.config.auto import AUTO_KEYS, page_tokens
from jaxserve.config.checks import scratch_pages
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import MLA, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.roles.capacity import GB, RoleBytes, role_bytes
from jaxserve.roles.parameters import count_parameters

HOST_PART, DEVICE_PART = 0.5, 0.9
"""Part of a host's free memory, or of what an accelerator reports, that a deployment may use; the
rest is the compiler's, and on a host everybody else's."""
USUAL_TOKENS = 4096
"""Length of the sequences for which slots are counted; CPUs, which are slow, `CPU_USUAL_TOKENS`."""
CPU_USUAL_TOKENS = 1024
CPU_SLOTS, LEAST_SLOTS, MOST_SLOTS = 32, 8, 256
CPU_TOKEN_BUDGET, TOKEN_BUDGET = 128, 512
CPU_CHUNK_PARAMETERS = 25_000_000
"""Parameters that a token meets, of each core, with which a CPU computes a chunk of `TOKEN_BUDGET`
tokens in a quarter of a second, at 100 GFLOP/s a core; nobody who decodes waits longer for it."""
CPU_SMALL_STEPS = (1, 8)
"""Tokens of steps with fewer sequences than slots; each takes some seconds to compile."""
CPU_LAYER_BYTES = 8_000_000
"""Weights of a layer for each core that takes part in it: half a millisecond, at what a core of a
server reads, beside the 0.1 ms that collectives between two cores take."""
SMALLEST_PAGES = 1024
"""Tokens of the smallest page bucket on accelerators."""
AFD_KEYS = frozenset(
    ("ffn.ep", "ffn.tp", "ffn.shared_ranks", "link.transport", "link.route", "link.dispatch")
)
"""Keys that only separate meshes have; a file with one of them means them."""


class Machine(NamedTuple):
    """The devices that a process may use for a deployment."""

    platform: Literal["cpu", "tpu", "gpu"]
    devices: int
    """Of a CPU its cores, each of which can be one."""
    memory: int | None
    """Bytes of each that the deployment may use, of a CPU of all together; None: nobody knows."""


class Choice(NamedTuple):
    """The value of a key that was open, and where it comes from."""

    value: Any
    reason: str


def choose_sizes(
    config: ModelConfig, deployment: Deployment, written: frozenset[str], machine: Machine
) -> dict[str, Choice]:
    """Values for the open keys of a deployment that one process has to itself.

    Args:
      deployment: with the structs' defaults in open keys.
      written: the dotted keys that are not open; they keep their values, whatever they lead to.

    Raises:
      ConfigError: the model cannot be cut as written keys ask.
    """
    return _Sizes(config, deployment, written, machine).choose()


class _Sizes:
    """The choice, key after key: each sees the ones before."""

    def __init__(
        self, config: ModelConfig, deployment: Deployment, written: frozenset[str], machine: Machine
    ):
        self._written, self._machine = written, machine
        self._now = deployment
        self._found: dict[str, Choice] = {}
        self._on_cpu = machine.platform == "cpu"
        self._config = msgspec.structs.replace(config, on_cpus=self._on_cpu)

    def choose(self) -> dict[str, Choice]:
        """All of it."""
        self._step_sizes()
        self._formats()
        self._layout()
        self._chunk()
        self._room()
        self._buckets()
        return {key: self._found[key] for key in AUTO_KEYS if key in self._found}

    def _set(self, key: str, value: Any, reason: str) -> None:
        """Chooses a value, unless the key is written."""
        if key in self._written:
            return
        self._found[key] = Choice(value, reason)
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
            if not self._fits(self._now):
                self._set("dtype", "bfloat16", "float32 does not fit into the host's memory")
        else:
            self._set("dtype", "bfloat16", "which the device multiplies fastest")

    def _step_sizes(self) -> None:
        """First values of what `_room` may make smaller."""
        size = page_tokens(self._machine.platform, self._now.cache_format)
        self._set("cache.page_size", size, "tokens that kernels read at a time")
        self._set("scheduler.max_length", self._config.max_positions, "the model's positions")
        if self._on_cpu:
            self._set("scheduler.slots", CPU_SLOTS, "beyond, a CPU gains little")
            least, reason = CPU_TOKEN_BUDGET, "a prompt's chunk that a CPU computes at a time"
        else:
            least, reason = TOKEN_BUDGET, "a prompt's chunk that keeps a device busy"
        budget = max(least, self._now.scheduler.slots * (1 + self._now.drafts))
        self._set("scheduler.token_budget", budget, reason)

    def _layout(self) -> None:
        """Attention's axes: all devices, nothing of the cache stored twice, weights divided most.

        A decode step reads the weights of a device once. So those of a device are to be few, which
        more tp makes them, as long as K and V heads are not copied; dp divides the experts.
        """
        if self._now.mode == "afd":
            return
        layouts = list(self._layouts())
        if not layouts:
            return  # the error is that of whoever builds it
        best = min(layouts, key=lambda one: self._rank(*one))
        (dp, tp), part = best
        heads = _kv_heads(self._config)
        of_all = f"{dp * tp} of {self._machine.devices} {'cores' if self._on_cpu else 'devices'}"
        reason = (
            f"{of_all}, weights {part.weights / GB:.2f} GB on each, "
            f"{heads} K and V head{'s' if heads > 1 else ''}"
        )
        self._set("attention.dp", dp, reason)
        self._set("attention.tp", tp, reason)

    def _chunk(self) -> None:
        """On a CPU a longer chunk of a prompt, where that keeps nobody waiting."""
        if not self._on_cpu:
            return
        met, cores = count_parameters(self._config).activated, self._now.attention.devices
        if met <= CPU_CHUNK_PARAMETERS * cores:
            budget = max(TOKEN_BUDGET, self._now.scheduler.token_budget)
            self._set("scheduler.token_budget", budget, "a prompt's chunk of a quarter of a second")

    def _layouts(self) -> Iterator[tuple[tuple[int, int], RoleBytes]]:
        """(dp, tp) that the model can be cut into, of each tp with the largest dp, and what a
        device then holds."""
        own = self._now.attention
        most = max(self._machine.devices, 1)
        if self._on_cpu:
            most = self._useful_cores(most)
        for tp in [own.tp] if "attention.tp" in self._written else _powers(most):
            free = range(1 if self._on_cpu else max(most // tp, 1), 0, -1)
            for dp in [own.dp] if "attention.dp" in self._written else free:
                tried = changed(changed(self._now, "attention.dp", dp), "attention.tp", tp)
                try:
                    yield (dp, tp), role_bytes(self._config, _with_pages(tried, 1))[0]
                    break
                except (ConfigError, ValueError):
                    continue

    def _useful_cores(self, cores: int) -> int:
        """Cores that share every layer: XLA computes much of a step on one thread a device."""
        try:
            part = role_bytes(self._config, _with_pages(self._now, 1))[0]
        except (ConfigError, ValueError):
            return 1
        layer = part.weights * part.devices // self._config.all_layers
        return max(1, min(cores, _kv_heads(self._config), layer // CPU_LAYER_BYTES))

    def _rank(self, layout: tuple[int, int], part: RoleBytes) -> tuple[float, ...]:
        """Smaller is better."""
        dp, tp = layout
        memory = self._memory(self._now, dp * tp)
        over = 0 if memory is None else max(0, part.total - memory)
        copies = max(1, tp // _kv_heads(self._config))
        return over, -dp * tp, copies, part.weights, tp

    def _room(self) -> None:
        """Pages in what weights and activations leave; slots, and the longest sequence, by them."""
        limits = self._now.scheduler
        usual = CPU_USUAL_TOKENS if self._on_cpu else USUAL_TOKENS
        if "scheduler.slots" not in self._written and not self._on_cpu:
            sequence = min(limits.max_length, usual)
            for slots in _halved(MOST_SLOTS, LEAST_SLOTS):
                self._set(
                    "scheduler.slots",
                    slots,
                    f"{slots * self._now.lanes} sequences of {sequence} tokens fit a DP group",
                )
                budget = max(TOKEN_BUDGET, slots * (1 + self._now.drafts))
                self._set("scheduler.token_budget", budget, "decode first, then prompts' chunks")
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
        """None: the memory is not known."""
        memory = self._memory(self._now)
        if memory is None:
            return None
        try:
            rest, page = self._fixed_bytes()
        except (ConfigError, ValueError):
            return None
        return max(0, (memory - rest) // page)

    def _fixed_bytes(self) -> tuple[int, int]:
        """Bytes of an attention device beside its pages, and of a page."""
        many = 1 << 12
        part = role_bytes(self._config, _with_pages(self._now, many))[0]
        return part.total - part.cache, max(1, part.cache // many)

    def _arithmetic(self) -> str:
        memory = self._memory(self._now)
        rest, page = self._fixed_bytes()
        assert memory is not None
        return (
            f"({memory / GB:.2f} GB - {rest / GB:.2f} GB of weights and activations) / "
            f"{page / 1e6:.3f} MB a page"
        )

    def _memory(self, deployment: Deployment, devices: int = 0) -> int | None:
        """Bytes of a device that the deployment may use, with so many (0: its own) on a CPU."""
        if written := round(deployment.attention.memory_gb * GB):
            return written
        memory = self._machine.memory
        if memory is None or not self._on_cpu or deployment.mode == "afd":
            return memory
        return memory // (devices or deployment.attention.dp * deployment.attention.tp)

    def _fits(self, deployment: Deployment) -> bool:
        memory = self._memory(deployment)
        if memory is None:
            return True
        try:
            parts = role_bytes(self._config, _with_pages(deployment, 1))
        except (ConfigError, ValueError):
            return True
        return sum(part.total for part in parts) <= memory

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
            return
        pages, least = {longest}, max(1, SMALLEST_PAGES // self._now.cache.page_size)
        while (size := min(pages) // 4) >= least:
            pages.add(size)
        self._set("scheduler.page_buckets", sorted(pages), "quarters of the longest sequence")


def changed(deployment: Deployment, key: str, value: Any) -> Deployment:
    """The deployment with another value of a dotted key."""
    section, _, name = key.rpartition(".")
    if not section:
        return msgspec.structs.replace(deployment, **{name: value})
    part = msgspec.structs.replace(getattr(deployment, section), **{name: value})
    return msgspec.structs.replace(deployment, **{section: part})


def _with_pages(deployment: Deployment, pages: int) -> Deployment:
    return changed(deployment, "cache.pages", pages)


def _kv_heads(config: ModelConfig) -> int:
    return 1 if isinstance(config.attention, MLA) else config.attention.kv_heads


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _halved(most: int, least: int) -> Iterator[int]:
    while most >= least:
        yield most
        most //= 2

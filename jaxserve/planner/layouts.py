"""The layouts that a search tries: how many devices a role, and how they share the work.

Called by `search.py`, whose docstring has the three modes. It knows nothing of speed and of memory.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping

import msgspec

from jaxserve.config.deployment import divide_slice
from jaxserve.config.topology import PlannedMode, Topology, TransportName, topology_of
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import CostModel

MODES: dict[PlannedMode, str] = {"afd": "AFD", "ep": "colocated EP", "tp": "colocated TP"}
COUNTS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 18, 20, 24, 32, 36, 40, 48, 64)
"""Numbers of hosts to try for a role."""
LANES = (1, 2, 3, 4)
"""Numbers of lanes to try."""
REDUNDANT_SLOTS = (0, 1, 2)
"""Redundant slots of a rank to try where experts are unevenly popular."""
SPARE = 0.25
"""Part of the experts that there may be more slots for, where the ranks do not divide them."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Devices and how they share the work. Colocated modes have no ffn devices of their own."""

    mode: PlannedMode
    attention: str
    ffn: str
    dp: int
    tp: int
    ep: int
    ffn_tp: int
    lanes: int
    drafts: int = 0
    """Drafts of a sequence and step, made by a multi-token-prediction module."""
    redundant_slots: int = 0
    """Slots of every ep rank for replicas of experts."""
    shared_ranks: int = 0
    """Number of ep ranks that hold the shared expert alone."""
    whole_shared: bool = False
    """True with `ffn.shared: whole`; a search does not try it."""
    instances: int = 1
    """The deployment's `ffn.instances`; a search does not try it."""
    whole_steps: bool = False
    """True with `pipeline: step`; a search does not try it."""
    transport: TransportName = "auto"
    """The deployment's `link.transport`: between two kinds of hardware, or two TPU slices, `pull`,
    which joins a runtime a host of attention and one for the FFN, with a process a host."""

    @functools.cached_property
    def topology(self) -> Topology:
        """Roles with a mesh each, and how experts are divided."""
        return topology_of(self.mode, self.transport)

    @property
    def attention_devices(self) -> int:
        """Devices of the attention role, or of all of a colocated deployment."""
        return self.dp * self.tp

    @property
    def ffn_devices(self) -> int:
        """Devices of the ffn role alone."""
        return self.ep * self.ffn_tp if self.topology.has("ffn") else 0

    @functools.cached_property
    def ffn_mesh(self) -> ExchangeMesh:
        """The devices that exchange rows."""
        attention = self.attention_devices if self.topology.has("ffn") else None
        more = self.shared_ranks, self.whole_shared, self.instances
        return ExchangeMesh(self.ep, self.ffn_tp, attention, *more)

    def slots(self, experts: int) -> SlotSizes:
        """Returns the slots of the routed experts on each rank."""
        return SlotSizes(experts, self.ep - self.shared_ranks, self.redundant_slots)

    @property
    def devices(self) -> int:
        return self.attention_devices + self.ffn_devices

    def dollars(self, attention: Hardware, ffn: Hardware) -> float:
        """Price of the devices in USD per hour, on this hardware."""
        return attention.price * self.attention_devices + ffn.price * self.ffn_devices

    @property
    def text(self) -> str:
        attention = f"{self.attention_devices} {self.attention} (dp {self.dp} tp {self.tp})"
        more = f", {self.drafts} draft{'s' * (self.drafts > 1)}" if self.drafts else ""
        if self.redundant_slots:
            more += f", {self.redundant_slots} redundant slot{'s' * (self.redundant_slots > 1)}"
        if self.topology.has("colocated"):
            shared = f", {self.shared_ranks} with the shared expert" if self.shared_ranks else ""
            return attention + shared + more
        ep = f"ep {self.ep}"
        if self.shared_ranks:
            ep += f" = {self.ep - self.shared_ranks} + {self.shared_ranks} shared"
        return f"{attention} + {self.ffn_devices} {self.ffn} ({ep} tp {self.ffn_tp}){more}"

    def overlapped(self, assumed: Assumptions) -> bool:
        """Whether two batches of a colocated deployment compute during each other's messages."""
        halves = self.topology.has("colocated") and self.lanes == 2
        together = assumed.overlapped or self.whole_steps
        return together and halves and self.topology.splits_experts


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The target of a search."""

    tpot: float
    """Seconds between a sequence's tokens."""
    max_devices: int = 64
    modes: tuple[PlannedMode, ...] = ("afd", "ep", "tp")
    most_drafts: int = 0
    """Largest number of drafts per step; all smaller numbers are tried, too."""
    shared_ranks: bool = False
    """Whether ranks for the shared expert alone are tried, too."""


class Layouts(msgspec.Struct, frozen=True):
    """All layouts of a model on the hardware, by name, that each role may use; colocated modes use
    what is in both. Replicas are tried of experts that are unevenly popular (`skewed`), and two
    batches of a colocated deployment that is `overlapped`."""

    model: CostModel
    attention: Mapping[str, Hardware]
    ffn: Mapping[str, Hardware]
    skewed: bool
    overlapped: bool = False

    def of(self, target: Target) -> Iterator[Layout]:
        """Everything that is tried, whether or not it fits."""
        replace = msgspec.structs.replace
        for shape in self._shapes(target):
            for shared in self._shared(shape.ep, target):
                cut = replace(shape, shared_ranks=shared)
                moves = self.skewed and cut.ep > 1 and self.model.moe is not None
                for redundant in REDUNDANT_SLOTS if moves else (0,):
                    for drafts in range(target.most_drafts + 1):
                        yield replace(cut, redundant_slots=redundant, drafts=drafts)

    def _shared(self, ep: int, target: Target) -> list[int]:
        """Numbers of ranks for the shared expert to try: none, and as many as leave every rank
        equally many rows to multiply (xDeepServe's 288 = 256 + 32)."""
        moe = self.model.moe
        found = [0] if ep == 1 or self._divides(ep) else []
        if target.shared_ranks and moe is not None and moe.shared_d_ff:
            parts, odd = divmod(moe.shared_d_ff, moe.expert_d_ff)
            ranks = round(ep * parts / (parts + moe.top_k))
            held = -(-moe.experts // max(1, ep - ranks))
            if not odd and 0 < ranks < ep and parts <= held and self._divides(ep - ranks):
                found.append(ranks)
        return found

    def _shapes(self, target: Target) -> Iterator[Layout]:
        if any(topology_of(mode).has("ffn") for mode in target.modes):
            for names in itertools.product(self.attention, self.ffn):
                yield from self._afd(*names, target)
        for name in (name for name in self.attention if name in self.ffn):
            yield from self._colocated(name, self.attention[name], target)

    def _afd(self, a_name: str, f_name: str, target: Target) -> Iterator[Layout]:
        """Layouts of two roles on this hardware, in runtimes of their own or in one."""
        a, f = self.attention[a_name], self.ffn[f_name]
        if a.platform != f.platform:
            return  # a GPU and a TPU have not served a model together
        for a_devices in _device_counts(a, target.max_devices - 1):
            for f_devices in _device_counts(f, target.max_devices - a_devices):
                apart = a_name != f_name
                if a.platform == "tpu" and not apart:  # else one slice has both roles
                    both = a_devices + f_devices
                    halves = divide_slice(both, (a_devices, f_devices))
                    apart = not (a.slice_of(both) and halves)
                if apart and not (a.slice_of(a_devices) and f.slice_of(f_devices)):
                    continue
                for tp, ffn_tp, lanes in itertools.product(
                    self._attention_tp(a, a_devices), self._ffn_tp(f, f_devices, target), LANES
                ):
                    yield Layout(
                        mode="afd",
                        attention=a_name,
                        ffn=f_name,
                        dp=a_devices // tp,
                        tp=tp,
                        ep=f_devices // ffn_tp,
                        ffn_tp=ffn_tp,
                        lanes=lanes,
                        transport="pull" if apart else "auto",
                    )

    def _colocated(self, name: str, hardware: Hardware, target: Target) -> Iterator[Layout]:
        for devices in filter(hardware.slice_of, _device_counts(hardware, target.max_devices)):
            for tp in self._attention_tp(hardware, devices):
                mode: PlannedMode = "tp" if tp == devices else "ep"
                dp = devices // tp
                if mode in target.modes and self._shared(dp, target):
                    made = functools.partial(Layout, mode=mode, attention=name, ffn=name)
                    for lanes in (1, 2) if self.overlapped and tp < devices else (1,):
                        yield made(dp=dp, tp=tp, ep=dp, ffn_tp=tp, lanes=lanes)

    def _attention_tp(self, hardware: Hardware, devices: int) -> list[int]:
        """Lists the numbers of devices that query heads divide over within the fast link."""
        heads = min(group.spec.q_heads for group in self.model.attention)
        most = min(devices, hardware.link_devices, hardware.devices_per_host)
        return [tp for tp in (1, 2, 4, 8) if tp <= most and devices % tp == 0 and heads % tp == 0]

    def _ffn_tp(self, hardware: Hardware, devices: int, target: Target) -> list[int]:
        both = sorted({1, min(devices, hardware.devices_per_host)})
        return [tp for tp in both if devices % tp == 0 and self._shared(devices // tp, target)]

    def _divides(self, ep: int) -> bool:
        """Returns whether `ep` ranks have few more slots than experts."""
        moe = self.model.moe
        return moe is None or -(-moe.experts // ep) * ep <= (1 + SPARE) * moe.experts


def _device_counts(hardware: Hardware, most: int) -> list[int]:
    """Parts of a host, and whole hosts."""
    host = hardware.devices_per_host
    parts = [count for count in (1, 2, 4) if count < host]
    return [count for count in (*parts, *(hosts * host for hosts in COUNTS)) if count <= most]

"""Accelerators as data (`configs/hardware/*.yaml`, read strictly), TPU slices, and the bandwidth of
the fast link, a switch or a torus, when many devices use it at once.

Exchanges of the ffn role move the bytes of `model/ffn/traffic.py`, which the engine runs by;
between islands of the fast link they cross the network. A switch (NVLink) gives every device its
bandwidth, whatever it talks to. On a torus (TPU) a device has a link to each neighbour, so two far
parts of a slice share the links between them. Knows nothing of models.
"""

import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.config.checks import least_slice
from jaxserve.config.shipped import CONFIGS
from jaxserve.config.yaml_text import read_yaml
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.traffic import ExchangeMesh, alltoall_moves, gather_moves
from jaxserve.model.row_width import RowBytes
from pallas_kernels.hopper import HOPPER

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]

MEASURES = ("price", "teraflops", "memory_gb", "memory_gb_s", "link_gb_s", "network_gb_s")
"""The fields that are measured or published figures; a file must give a source for each."""

MONTH = 730.0
"""Hours of a month, for prices by the hour."""
LARGEST_SLICE = 4096
"""Chips of the largest TPU slice that Google Cloud lists by its dimensions."""


class TpuNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Google Cloud names a TPU; a cluster refuses wrong values.

    Attributes:
      label: value of the node label `cloud.google.com/gke-tpu-accelerator`.
      slice_type: Cloud TPU's type, before the number; empty: only available on GKE.
      counts: what that number counts, per chip: 1 for chips, 2 for cores.
      software: runtime version of its VMs.
    """

    label: str
    slice_type: str = ""
    counts: Count = 1
    software: str = ""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One device, and the host and network around it. GB are 10^9 bytes."""

    name: str
    price: Positive
    """USD per device and hour."""
    teraflops: dict[str, Positive]
    """10^12 dense multiply-add FLOP/s, by number format; `bfloat16` always."""
    memory_gb: Positive
    memory_gb_s: Positive
    """Memory bandwidth in GB/s."""
    devices_per_host: Count
    link_gb_s: Positive
    """GB/s of a device, one way, to devices that the fast link reaches (NVLink, ICI, PCIe)."""
    link_devices: Count
    """Number of devices that the fast link joins."""
    network_gb_s: Positive
    """GB/s of a host, one way, over all its network cards."""
    torus: Annotated[int, Meta(ge=0, le=3)] = 0
    """Dimensions of the torus that the fast link forms; `link_gb_s` is the sum of the two links of
    a dimension. 0: a switch."""
    ring: Count = 4
    """A dimension whose length is a multiple of this number of chips is a ring; others are open."""
    tile_rows: Count = 1
    """Rows to which kernels pad the query heads of a KV head: the products' smallest tile."""
    int8_attention: Positive = 1.0
    """Speed-up of attention by `attention.int8_products` over BF16 products, both on INT8 pages, if
    the products set the time; 1: no kernel."""
    tpu: TpuNames | None = None
    sources: dict[str, str]
    """Source of each figure, by field."""
    device_kinds: list[str] = []
    """Names that JAX has for the device."""
    jax_devices: Count = 1
    """JAX devices per accelerator; 2 for TPU v7x, whose chips have two cores. The files describe
    accelerators, as they are sold; `load_hardware` returns their JAX devices, which are what a
    deployment counts."""

    @functools.cached_property
    def platform(self) -> str:
        """`tpu`, `gpu`, `cpu`, or the name of an accelerator that JAX does not know."""
        if any(kind.startswith("TPU") for kind in self.device_kinds):
            return "tpu"
        if "cpu" in self.device_kinds:
            return "cpu"
        return "gpu" if self.device_kinds else self.name

    @property
    def process_devices(self) -> int:
        """Devices of a process of a runtime with both roles, as `launch` starts it: on GPUs one,
        since the host time of a layer grows with them."""
        return 1 if self.platform == "gpu" else self.devices_per_host

    @property
    def pads(self) -> bool:
        """Whether a stage takes its full bucket's time: true on CPUs, which have no kernels."""
        return self.platform == "cpu"

    @property
    def is_hopper(self) -> bool:
        """Whether it is a GPU that has kernels."""
        return any(name in kind for kind in self.device_kinds for name in HOPPER)

    @property
    def gpu_product(self) -> str:
        """Node label `nvidia.com/gpu.product` (GPU feature discovery); empty: unknown."""
        return self.device_kinds[0].replace(" ", "-") if self.device_kinds else ""

    def slice_of(self, devices: int) -> bool:
        """Returns whether this number of JAX devices can be rented. TPUs come in slices."""
        most = min(LARGEST_SLICE * self.jax_devices, self.link_devices)
        there = least_slice(devices, self.jax_devices, self.torus)
        return self.platform != "tpu" or devices == there <= most

    def stores(self, number_format: str) -> bool:
        """Whether weights and cache may be kept in this format there. A GPU widens what it cannot
        multiply; a TPU without FP8 has no kernels for it."""
        return number_format != "fp8" or self.platform != "tpu" or "fp8" in self.teraflops

    def flops(self, number_format: str) -> float:
        """Peak FLOP/s of products in this format; BF16's if it is not supported."""
        return self.teraflops.get(number_format, self.teraflops["bfloat16"]) * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.memory_gb_s * 1e9

    @property
    def memory(self) -> float:
        return self.memory_gb * 1e9

    @property
    def link(self) -> float:
        """Bytes/s of a device, one way, over the fast link."""
        return self.link_gb_s * 1e9

    @property
    def network(self) -> float:
        """Bytes/s of a device, one way: its share of the host's network."""
        return self.network_gb_s * 1e9 / self.devices_per_host

    @property
    def _one_link(self) -> float:
        """Bytes/s of a JAX device, one way, over one of its chip's links."""
        return self.link / (2 * self.torus)

    def shape(self, devices: int) -> tuple[int, ...]:
        """Returns the chips along each dimension of the smallest slice with these devices,
        ascending: 16 chips are 4 × 4, or 2 × 2 × 4. Two chips are neighbours, which is a part of a
        slice."""
        sizes, factor = [1] * self.torus, 2
        left = -(-devices // self.jax_devices)
        if left > 2:
            left = least_slice(devices, self.jax_devices, self.torus) // self.jax_devices
        while left > 1:
            while left % factor:
                factor += 1
            sizes.sort()
            sizes[0] *= factor
            left //= factor
        return tuple(sorted(sizes))

    def rings(self, sizes: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns for each dimension of a slice whether its ends are joined; of three all, or
        none."""
        fit = [size % self.ring == 0 for size in sizes]
        return (all(fit),) * len(sizes) if self.torus == 3 else tuple(fit)

    def _sides(self, devices: int) -> list[tuple[int, bool]]:
        """Chips along each dimension of the smallest slice, and whether it is a ring."""
        sizes = self.shape(devices)
        return [*zip(sizes, self.rings(sizes), strict=True)]

    def hops(self, devices: int) -> int:
        """Links between the farthest devices of a slice; 0 with a switch."""
        sides = self._sides(devices) if self.torus else []
        return sum(size // 2 if ring else size - 1 for size, ring in sides)

    def gather_bandwidth(self, devices: int) -> float:
        """Bytes/s that every device receives while all get the same: the links of a chip in the
        corner, which without a ring has one a dimension."""
        if not self.torus or devices <= self.jax_devices:
            return self.link
        return self._one_link * sum(1 + ring for size, ring in self._sides(devices) if size > 1)

    def alltoall_bandwidth(self, devices: int) -> float:
        """Bytes/s that every device receives in an all-to-all, half of which crosses the middle."""
        if not self.torus or devices <= self.jax_devices:
            return self.link
        across = 4 * self.middle_bandwidth(devices) / devices
        return min(across, self.gather_bandwidth(devices))

    def middle_bandwidth(self, devices: int) -> float:
        """Bytes/s, one way, between the two halves of a slice; unlimited with a switch. 8 × 8 TPU
        v6e: eight links of 100 GB/s, which is 25 GB/s a chip of either half."""
        if not self.torus:
            return math.inf
        if devices <= self.jax_devices:
            return self.link
        *others, (_, ring) = self._sides(devices)
        links = math.prod(size for size, _ in others) * (1 + ring)
        return links * self.jax_devices * self._one_link


def known_hardware(folder: Path = CONFIGS) -> list[str]:
    """Names of the hardware files."""
    return sorted(path.stem for path in (folder / "hardware").glob("*.yaml"))


def load_hardware(
    name: str, prices: Mapping[str, float] | None = None, folder: Path = CONFIGS
) -> Hardware:
    """Loads one JAX device of known hardware, by its name or by what JAX calls it ("NVIDIA H200"),
    or of a YAML file by its path. `prices` are USD an accelerator and hour by name, in place of the
    files'. Raises ConfigError if it is unknown (lists the known ones), or its file is wrong."""
    path = Path(name) if name.endswith(".yaml") else folder / "hardware" / f"{name.lower()}.yaml"
    if not path.is_file():
        files = sorted((folder / "hardware").glob("*.yaml"))
        kinds = {kind: each for each in files for kind in read_struct(each, Hardware).device_kinds}
        if name not in kinds:
            raise ConfigError(unknown("hardware", name, [each.stem for each in files]))
        path = kinds[name]
    hardware = read_struct(path, Hardware)
    problems = [] if "bfloat16" in hardware.teraflops else ["teraflops has no bfloat16"]
    if missing := [field for field in MEASURES if field not in hardware.sources]:
        problems.append(f"sources lacks {', '.join(missing)}")
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    price = (prices or {}).get(name.lower(), hardware.price)
    return _jax_device(msgspec.structs.replace(hardware, price=price))


def _jax_device(hardware: Hardware) -> Hardware:
    """Returns one JAX device: its share of an accelerator and of the fast link of its chip."""
    parts = hardware.jax_devices
    if parts == 1:
        return hardware
    shared = ("price", "memory_gb", "memory_gb_s", "link_gb_s")
    changed = {name: getattr(hardware, name) / parts for name in shared}
    changed |= {
        name: getattr(hardware, name) * parts for name in ("devices_per_host", "link_devices")
    }
    teraflops = {name: value / parts for name, value in hardware.teraflops.items()}
    name = f"{hardware.name} core"
    return msgspec.structs.replace(hardware, name=name, teraflops=teraflops, **changed)


def read_struct[Kind](
    path: Path, kind: type[Kind], hook: Any = None, *, json: bool = False
) -> Kind:
    """Reads a YAML or a JSON file as a strict struct, in YAML with msgspec's `dec_hook`. Raises
    ConfigError if it is none, a key is unknown, missing or, in YAML, there twice, or a value is
    wrong."""
    try:
        data = path.read_bytes()
        if json:
            return msgspec.json.decode(data, type=kind)
        return msgspec.convert(read_yaml(data.decode(), str(path)), kind, dec_hook=hook)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """The error message for an unknown name."""
    near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {name!r} is not known{hint or '.'} Known: {', '.join(known)}"


def gather_seconds(
    hardware: Hardware, mesh: ExchangeMesh, row: RowBytes, *, brought: bool
) -> tuple[float, float]:
    """Seconds there and back of a device's row in a gather, at the peak of link and network.
    Between islands of the fast link a row moves once, and the fast link spreads it then; or the
    link between the roles has `brought` the rows to every island, and takes the islands' results in
    the model's format from there (`Assumptions.broadcast`)."""
    link = hardware.gather_bandwidth(mesh.ranks * mesh.tensor)
    far, moved = mesh.peers / _near(hardware, mesh) - 1, gather_moves(mesh, row)
    network = math.inf if brought else hardware.network

    def seconds(whole: float, size: int) -> float:
        return (whole - far * size) / link + far * size / network

    return seconds(moved.there, row.packed), seconds(moved.back, row.result)


def alltoall_seconds(
    hardware: Hardware, mesh: ExchangeMesh, row: RowBytes, reached: float, *, shared: bool
) -> tuple[float, float]:
    """Seconds there and back of a device's row in an all-to-all, at the peak of link and network,
    which are busy at once. A row moves as often as ranks need it: to the part `reached` of them;
    `shared`: the model has a shared expert."""
    link = hardware.alltoall_bandwidth(mesh.ranks * mesh.tensor)
    far = reached * (mesh.peers - _near(hardware, mesh))
    moved = alltoall_moves(mesh, row, reached, shared=shared)

    def seconds(whole: float, size: int) -> float:
        return max((whole - far * size) / link, far * size / hardware.network)

    return seconds(moved.there, row.packed), seconds(moved.back, row.result)


def _near(hardware: Hardware, mesh: ExchangeMesh) -> int:
    """Devices with rows of their own on an island of the fast link."""
    return min(mesh.peers, hardware.link_devices // (1 if mesh.split else mesh.tensor) or 1)

"""Hosts of accelerators as clusters name them: TPU slices of Google Cloud, GPU servers.

Called by `launch` and by `slice_layout.py`. It knows no deployments.
"""

from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.planner.hardware import Hardware


class TpuKind(NamedTuple):
    """How Google Cloud names a TPU.

    Attributes:
      label: value of the node label `cloud.google.com/gke-tpu-accelerator`.
      slice_type: Cloud TPU's type, before the number; empty: only available on GKE.
      counts: what that number counts, per chip: 1 for chips, 2 for cores.
      software: runtime version of its VMs.
      dimensions: number of dimensions of a slice.
    """

    label: str
    slice_type: str
    counts: int
    software: str
    dimensions: int


TPUS = {
    "v5e": TpuKind("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite", 2),
    "v5p": TpuKind("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5", 3),
    "v6e": TpuKind("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e", 2),
    "v7x": TpuKind("tpu7x", "", 2, "", 3),
}
"""TPU kinds by their names in `configs/hardware`. From memory, as of 2026, of
https://cloud.google.com/kubernetes-engine/docs/concepts/tpus and
https://cloud.google.com/tpu/docs/runtimes; a cluster refuses wrong values."""

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
    4096: "16x16x16",
}


class TpuSlice(NamedTuple):
    """A slice: `hosts` machines of `chips_per_host` chips each."""

    kind: TpuKind
    topology: str
    hosts: int
    chips_per_host: int

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def accelerator_type(self) -> str:
        """Name of the slice in `gcloud compute tpus`, like `v6e-64`."""
        return f"{self.kind.slice_type}-{self.chips * self.kind.counts}"


def tpu_slice(name: str, chips: int) -> TpuSlice:
    """Returns the slice with `chips` chips.

    Args:
      name: name of the hardware.

    Raises:
      ConfigError: no such slice exists; lists the existing slices.
    """
    if name not in TPUS:
        raise ConfigError(f"hardware {name}: expected a TPU: {', '.join(TPUS)}")
    kind = TPUS[name]
    topologies = _FLAT if kind.dimensions == 2 else _DEEP
    if chips not in topologies:
        raise ConfigError(
            f"{chips} chips of {name}: there are slices of {', '.join(map(str, topologies))}"
        )
    whole = chips if kind.dimensions == 2 and chips <= 8 else 4
    return TpuSlice(kind, topologies[chips], chips // whole, whole)


def gpu_product(hardware: Hardware) -> str:
    """Value of the node label `nvidia.com/gpu.product` (GPU feature discovery); empty: unknown."""
    return hardware.device_kinds[0].replace(" ", "-") if hardware.device_kinds else ""

"""TPU slices as Google Cloud rents and names them."""

from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.planner.hardware import LARGEST_SLICE, Hardware, TpuNames, shape


class TpuSlice(NamedTuple):
    """A slice: `hosts` machines of `chips_per_host` chips each."""

    kind: TpuNames
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


def tpu_slice(name: str, hardware: Hardware, devices: int) -> TpuSlice:
    """Returns the slice with this number of JAX devices.

    Args:
      name: name of the hardware, for messages.
      hardware: a JAX device of it.
      devices: JAX devices, of which a chip may have two.

    Raises:
      ConfigError: no such slice exists, or the last chip is not whole; lists the existing slices.
    """
    if hardware.tpu is None:
        raise ConfigError(f"hardware {name}: its file does not say how clusters name it (`tpu`)")
    flat, cores = hardware.torus == 2, hardware.jax_devices
    chips = devices // cores
    if not hardware.slice_of(devices):
        powers = (1 << power for power in range(LARGEST_SLICE.bit_length()))
        known = [str(power) for power in powers if hardware.slice_of(power * cores)]
        more = "" if flat else ", and other multiples of 64"
        raise ConfigError(
            f"{devices / cores:g} chips of {name}: there are slices of {', '.join(known)}{more}"
        )
    sizes = shape(hardware, devices)
    whole = chips if flat and chips <= 8 else 4
    # A dimension of one chip comes last: 2x2x1.
    text = "x".join(map(str, sizes if sizes[0] > 1 else sizes[::-1]))
    return TpuSlice(hardware.tpu, text, chips // whole, whole)

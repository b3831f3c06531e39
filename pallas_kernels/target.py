"""Selects the backend for which an op is compiled. Every op's `api.py` asks here.

The mesh of the surrounding `shard_map` determines the devices, so that callers need not pass them,
and programs compiled ahead of time for a topology get their kernels too. Outside a mesh it is the
default device. Imports no kernel.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax

from pallas_kernels.hopper import BEFORE_HOPPER, HOPPER

Backend = Literal["reference", "mosaic_tpu", "mosaic_gpu", "triton_gpu"]

EVERY_KERNEL: tuple[Backend, ...] = ("mosaic_tpu", "mosaic_gpu")
"""Backends that may have a kernel of any op."""
WITH_ATTENTION: tuple[Backend, ...] = (*EVERY_KERNEL, "triton_gpu")
"""Backends that have a kernel of paged attention, the only kernel of `triton_gpu`."""


LEFT_TO_COLLECTIVES = 12
"""Multiprocessors of a GPU that attention leaves to collectives; products leave all but four of
these (`mosaic_gpu.py`). NCCL's kernels share no multiprocessor with ours: if ours take all 132 of
an H200, a collective waits until a whole kernel has ended."""


class Target(NamedTuple):
    """A backend and the device that it compiles for.

    Attributes:
      backend: `reference` is plain XLA, which every platform has.
      device_kind: as JAX names it, for instance "cpu", "TPU v6 lite", "NVIDIA H200".
      interpret: run the kernels of the backend on the CPU, as tests do: far too slow to serve.
      left: multiprocessors of a GPU that kernels leave to collectives beside them.
    """

    backend: Backend
    device_kind: str
    interpret: bool = False
    left: int = LEFT_TO_COLLECTIVES


_forced: ContextVar[Target | None] = ContextVar("pallas_kernels target", default=None)


def target_of(platform: str, device_kind: str) -> Target:
    """Returns the backend for a kind of device."""
    if platform == "tpu":
        return Target("mosaic_tpu", device_kind)
    if platform in ("cuda", "gpu") and any(name in device_kind for name in HOPPER):
        return Target("mosaic_gpu", device_kind)
    if platform in ("cuda", "gpu") and any(name in device_kind for name in BEFORE_HOPPER):
        return Target("triton_gpu", device_kind)
    return Target("reference", device_kind)


def current_target() -> Target:
    """Returns the target of the op that is being traced.

    A GPU that is the only device of its runtime has no collectives: its kernels take all of it.
    """
    if (forced := _forced.get()) is not None:
        return forced
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    target = target_of(device.platform, device.device_kind)
    if target.backend not in ("mosaic_gpu", "triton_gpu"):
        return target
    alone = jax.device_count() == 1 and jax.devices()[0].device_kind == target.device_kind
    return target._replace(left=0) if alone else target


def by_platform(*operands: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """Runs the branch of the platform that the op is traced for, as `jax.lax.platform_dependent`
    does, which traces all branches. Outside a mesh, where no device is known yet, it still does.

    Args:
      branches: by platform: "cpu", "gpu" or "tpu".
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.lax.platform_dependent(*operands, default=default, **branches)
    platform = "gpu" if device.platform == "cuda" else device.platform
    return branches.get(platform, default)(*operands)


@contextlib.contextmanager
def use_target(target: Target) -> Iterator[None]:
    """Context in which ops are traced for this target; earlier traces keep theirs.

    JAX's trace caches ignore the target, so functions that are jitted inside should be created
    inside.
    """
    token = _forced.set(target)
    try:
        yield
    finally:
        _forced.reset(token)


def kernels(op: str, target: Target, part: str = "") -> ModuleType:
    """Imports the kernels of an op, `pallas_kernels/OP/BACKEND.py`, and only now.

    Args:
      part: of the module's name, where an op has several, as `_latents`.
    """
    return importlib.import_module(f"pallas_kernels.{op}.{target.backend}{part}")

"""What runs where a device's kernels do not cover a call: said once, or refused; never silently.

Every op's `api.py` asks here. Plain XLA gives the same result on every platform, and on a TPU or a
GPU far more slowly. On CPUs it is what runs, and nothing is said.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args

from pallas_kernels.hopper import BEFORE_HOPPER, HOPPER
from pallas_kernels.target import EVERY_KERNEL, Backend, Target, current_target
from pallas_kernels.tuned import Fields

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "kernel", "reference"]
"""How an op runs: `auto` takes a kernel if the device has one and plain XLA otherwise; `kernel`
takes a kernel or raises NotImplementedError; `reference` takes plain XLA."""


class Fallback(NamedTuple):
    """A call that no kernel of the device covers."""

    op: str
    device_kind: str
    reason: str
    """What of the call is not covered."""
    cost: str
    """What runs instead, and what that costs."""

    def __str__(self) -> str:
        return (
            f"{self.op}: no kernel on {self.device_kind} for {self.reason}; plain XLA {self.cost}"
        )


class SlowKernel(NamedTuple):
    """A call that a kernel covers, far more slowly than others."""

    op: str
    device_kind: str
    reason: str
    cost: str

    def __str__(self) -> str:
        return f"{self.op}: slow on {self.device_kind} for {self.reason}; the kernel {self.cost}"


_lock = threading.Lock()
_said: set[Fallback | SlowKernel] = set()
_refused = False
_collected: ContextVar[list[Fallback | SlowKernel] | None] = ContextVar(
    "pallas_kernels fallbacks", default=None
)


def refuse_fallbacks(refuse: bool = True) -> None:
    """From now on, in the whole process: calls that fall back raise NotImplementedError (True), or
    log a warning, once each (False)."""
    global _refused
    _refused = refuse


@contextlib.contextmanager
def collect_fallbacks() -> Iterator[list[Fallback | SlowKernel]]:
    """Context in which fallbacks of what is traced here are collected and neither logged nor
    refused; each once."""
    found: list[Fallback | SlowKernel] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def collects_fallbacks() -> bool:
    """Whether what is traced here is traced for its fallbacks, and will not run."""
    return _collected.get() is not None


def check_implementation(implementation: Implementation) -> None:
    """Raises ValueError where it is none."""
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation is {implementation!r}, needs one of {get_args(Implementation)}"
        )


def kernel_target(
    op: str,
    implementation: Implementation,
    gap: Callable[[Target], str],
    cost: str,
    tiles: Fields | None = None,
    *,
    fused_on_tpus: str = "",
    backends: tuple[Backend, ...] = EVERY_KERNEL,
) -> Target | None:
    """Returns the target whose kernel a call runs; None: plain XLA.

    Args:
      gap: what of the call the kernels of a target do not cover; empty: nothing.
      cost: as of `Fallback`.
      tiles: given for the kernel.
      fused_on_tpus: of an op without kernels for TPUs, what XLA fuses there, so that it falls back
        to nothing worse.
      backends: backends that have a kernel of the op.

    Raises:
      ValueError: the implementation is unknown; or there are tiles and no kernel that they are for.
      NotImplementedError: there is no kernel, and plain XLA is not allowed.
    """
    check_implementation(implementation)
    if implementation == "reference":
        if tiles:
            raise ValueError(f"tiles of {op}: implementation is 'reference', which has none")
        return None
    target = current_target()
    if fused_on_tpus and target.backend == "mosaic_tpu":
        if implementation == "auto" and not tiles:
            return None
        reason = fused_on_tpus
    elif target.backend in backends:
        reason = gap(target)
        if not reason:
            return target
    else:
        names = HOPPER + (BEFORE_HOPPER if "triton_gpu" in backends else ())
        reason = f"this device: there are some for TPUs and for {', '.join(names)}"
    fallback = Fallback(op, target.device_kind, reason, cost)
    if implementation == "kernel":
        raise NotImplementedError(str(fallback))
    if tiles:
        raise ValueError(
            f"tiles of {op}: plain XLA, which has none, runs on {target.device_kind}; there is no "
            f"kernel for {reason}"
        )
    if target.backend != "reference" or target.device_kind != "cpu":
        fall_back(fallback)
    return None


def fall_back(fallback: Fallback | SlowKernel) -> None:
    """Says that a call falls back, or that its kernel is slow.

    Raises:
      NotImplementedError: after `refuse_fallbacks`.
    """
    if (found := _collected.get()) is not None:
        if fallback not in found:
            found.append(fallback)
        return
    if _refused:
        raise NotImplementedError(str(fallback))
    with _lock:
        first = fallback not in _said
        _said.add(fallback)
    if first:
        logger.warning("%s", fallback)

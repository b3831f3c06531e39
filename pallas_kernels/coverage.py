"""Decides what runs if a device's kernels do not cover a call; logs it once, or refuses it.

Called by every op's `api.py`. Plain XLA gives the same result on every platform, but far more
slowly on a TPU or a GPU. On CPUs plain XLA is the normal case, and nothing is logged.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from pallas_kernels.hopper import BEFORE_HOPPER, HOPPER
from pallas_kernels.target import EVERY_KERNEL, Backend, Target, current_target
from pallas_kernels.tuned import Fields

logger = logging.getLogger(__name__)


class Fallback(NamedTuple):
    """A call that no kernel of the device covers, or that its kernel runs far more slowly than
    others (`slow`)."""

    op: str
    device_kind: str
    reason: str
    """Property of the call that no kernel covers, or that makes it slow."""
    cost: str
    """Continues "plain XLA …", or "the kernel …", in the message: what it does, and the cost."""
    slow: bool = False

    def __str__(self) -> str:
        what, who = ("slow", "the kernel") if self.slow else ("no kernel", "plain XLA")
        return f"{self.op}: {what} on {self.device_kind} for {self.reason}; {who} {self.cost}"


_lock = threading.Lock()
_said: set[Fallback] = set()
_refused = False
_collected: ContextVar[list[Fallback] | None] = ContextVar("pallas_kernels fallbacks", default=None)


def refuse_fallbacks(refuse: bool = True) -> None:
    """Sets for the whole process whether a call that falls back raises NotImplementedError (True)
    or logs a warning, once each (False)."""
    global _refused
    _refused = refuse


@contextlib.contextmanager
def collect_fallbacks() -> Iterator[list[Fallback]]:
    """Context that collects the fallbacks of code traced inside it, each once, instead of logging
    or refusing them."""
    found: list[Fallback] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def collects_fallbacks() -> bool:
    """Whether code is being traced only to collect its fallbacks, and will not run."""
    return _collected.get() is not None


def kernel_target(
    op: str,
    gap: Callable[[Target], str],
    cost: str,
    tiles: Fields | None = None,
    *,
    fused_on_tpus: bool = False,
    backends: tuple[Backend, ...] = EVERY_KERNEL,
) -> Target | None:
    """Returns the target whose kernel a call runs; None: plain XLA.

    Args:
      gap: returns the property of the call that a target's kernels do not cover; empty: none.
      cost: see `Fallback.cost`.
      tiles: tile sizes that the caller gave for the kernel.
      fused_on_tpus: whether XLA fuses the op well on TPUs, so that it is no fallback there.
      backends: backends that have a kernel of the op.

    Raises:
      ValueError: tiles are given, but no kernel runs.
      NotImplementedError: no kernel covers the call, and plain XLA is not allowed.
    """
    target = current_target()
    if fused_on_tpus and target.backend == "mosaic_tpu":
        return None
    if target.backend in backends:
        reason = gap(target)
        if not reason:
            return target
    else:
        names = [*HOPPER, *(BEFORE_HOPPER if "triton_gpu" in backends else ())]
        reason = f"this device: there are some for TPUs and for {', '.join(names)}"
    if tiles:
        raise ValueError(
            f"tiles of {op}: plain XLA, which has none, runs on {target.device_kind}; there is no "
            f"kernel for {reason}"
        )
    if target.backend != "reference" or target.device_kind != "cpu":
        fall_back(Fallback(op, target.device_kind, reason, cost))
    return None


def fall_back(fallback: Fallback) -> None:
    """Reports that a call falls back, or that its kernel is slow: collects it, or logs it once.

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

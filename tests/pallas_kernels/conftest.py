"""Quicker callbacks of interpreted kernels."""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


def _argument(value: Any) -> Any:
    """A copy: XLA may use the memory again once the callback has returned."""
    return np.array(value) if value.ndim or value.dtype.kind not in "iub" else np.asarray(value)[()]


def _to_int(value: Any) -> Any:
    return value if isinstance(value, jax.core.Tracer) else int(value)


def _call(*arguments: Any, callback: Any, result_avals: Any, **_: Any) -> list[np.ndarray]:
    results = callback(*map(_argument, arguments))
    return [np.asarray(x, aval.dtype) for x, aval in zip(results, result_avals, strict=True)]


@pytest.fixture(autouse=True)
def _quick_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels call Python thousands of times, for every load, copy and wait. JAX makes
    device arrays of all arguments first, which takes longer than what is done with them; here they
    are NumPy's, whose scalars the interpreter of GPU kernels does not expect."""
    monkeypatch.setattr(callbacks, "io_callback_impl", _call)
    monkeypatch.setattr(shared_memory, "_to_int", _to_int, raising=False)

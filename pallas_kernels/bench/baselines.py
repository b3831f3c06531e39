"""Alternatives to the ops on the same inputs: JAX's own functions, tokamax, PyTorch.

Called by the bench. Each is a function of (step, arguments) that prepares a call. It may raise any
exception if its library is missing or cannot do this; the bench reports it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import correctness, norm_quantize, timing
from pallas_kernels.norm_quantize.reference import rms_norm_quantize
from pallas_kernels.quantize import QuantArray


class Prepared(NamedTuple):
    """A prepared call of another library.

    Attributes:
      result: returns the call's result, in the shape of the op's result.
      seconds: returns the call's seconds.
    """

    result: Callable[[], Any]
    seconds: Callable[[timing.Effort], float]


def measured(
    op: str, step: Any, arguments: tuple[Any, ...], right: Any, effort: timing.Effort
) -> dict[str, dict[str, Any]]:
    """Returns the seconds of every baseline of an op and its distance from the right result (of the
    last rows, if `right` has fewer), or the reason why it has none."""
    found: dict[str, dict[str, Any]] = {}
    for name, baseline in BASELINES[op].items():
        try:
            prepared = baseline(step, arguments)
            error = correctness.distance(prepared.result(), right)
            found[name] = {"seconds": prepared.seconds(effort), "error": error}
        except Exception as error:  # another library's failure must not lose our measurements
            found[name] = {"skipped": f"{type(error).__name__}: {str(error)[:200]}"}
    return found


def _of_jax(function: Callable[..., Any], *inputs: Any) -> Prepared:
    return Prepared(
        lambda: jax.jit(function)(*inputs),
        lambda effort: timing.timed(function, effort, *inputs)[0],
    )


def _jax_paged_attention(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    queries, pages, scales, (table, _, position) = arguments
    if step.shape.shared or scales or step.queries > 1:
        raise NotImplementedError("one query a sequence, BF16, K and V apart")
    pages = tuple(jnp.swapaxes(array, 0, 1) for array in pages)
    scale = step.shape.head_dim**-0.5
    platform = jax.default_backend()

    def on_tpu(queries: Any, *rest: Any) -> Any:
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        scaled = queries * jnp.asarray(scale, queries.dtype)
        return paged_attention(scaled, *rest, pages_per_compute_block=4)

    def on_gpu(queries: Any, keys: Any, values: Any, lengths: Any, table: Any) -> Any:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        scaled = queries * jnp.asarray(scale, queries.dtype)
        return paged_attention(scaled, keys, values, table, lengths)

    if platform not in ("tpu", "gpu", "cuda"):
        raise NotImplementedError(f"not for {platform}")
    function = on_tpu if platform == "tpu" else on_gpu
    return _of_jax(function, queries, *pages, position + 1, table)


def _contiguous(step: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Returns queries, keys, values [sequences, tokens, heads, width], gathered from pages."""
    queries, pages, scales, (table, *_) = arguments
    shape = step.shape
    if scales:
        raise NotImplementedError("BF16 only")
    if step.queries > 1:
        raise NotImplementedError("one query a sequence: its mask is another one for several")
    rows = [jnp.swapaxes(array[table], 2, 3) for array in pages]
    rows = [array.reshape(step.sequences, step.context, *array.shape[3:]) for array in rows]
    keys = rows[0]
    values = keys[..., : shape.v_width] if shape.shared else rows[1]
    return queries[:, None], keys, values


def _tokamax_attention(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    """Attends to keys and values that lie one after the other, not in pages."""
    import tokamax

    def attend(*inputs: Any) -> Any:
        return tokamax.dot_product_attention(*inputs, scale=step.shape.head_dim**-0.5)[:, 0]

    return _of_jax(attend, *_contiguous(step, arguments))


def _torch_attention(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    """Attends to keys and values that lie one after the other, not in pages."""
    torch = _torch()
    inputs = [_to_torch(array.swapaxes(1, 2)) for array in _contiguous(step, arguments)]

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            *inputs, scale=step.shape.head_dim**-0.5, enable_gqa=True
        )[:, :, 0]

    return _of_torch(attend)


def _swiglu_by(dot: Callable[[Any, Any, Any], Any], arguments: tuple[Any, ...]) -> Prepared:
    """Runs the expert layer by `dot(rows, weights [groups, in, out], sizes)`."""
    rows, *weights, sizes = _unquantised(arguments)
    turned = [jnp.swapaxes(array, 1, 2) for array in weights]

    def swiglu(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        hidden = jax.nn.silu(dot(rows, gate, sizes)) * dot(rows, up, sizes)
        return dot(hidden.astype(rows.dtype), down, sizes).astype(rows.dtype)

    return _of_jax(swiglu, rows, *turned, sizes)


def _ragged_dot(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    def dot(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

    return _swiglu_by(dot, arguments)


def _tokamax_ragged_dot(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    import tokamax

    def dot(x: Any, w: Any, sizes: Any) -> Any:
        return tokamax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

    return _swiglu_by(dot, arguments)


def _torch_grouped_mm(step: Any, arguments: tuple[Any, ...]) -> Prepared:
    torch = _torch()
    rows, *weights, sizes = _unquantised(arguments)
    rows, gate, up, down = (_to_torch(array) for array in (rows, *weights))
    ends = torch.tensor(np.cumsum(np.asarray(sizes)), dtype=torch.int32, device="cuda")

    def dot(x: Any, w: Any) -> Any:
        return torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends)

    def swiglu() -> Any:
        return dot(torch.nn.functional.silu(dot(rows, gate)) * dot(rows, up), down)

    return _of_torch(swiglu)


def _unquantised(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(array, QuantArray) for array in arguments):
        raise NotImplementedError("weights with scales")
    return arguments


def _torch() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("PyTorch has no GPU here")
    return torch


def _to_torch(array: Any) -> Any:
    """Moves a BF16 array to PyTorch's GPU through the host: the two may use different devices."""
    torch = _torch()
    bits = np.asarray(jax.lax.bitcast_convert_type(array, jnp.int16))
    return torch.from_numpy(bits.copy()).cuda().view(torch.bfloat16)


def _of_torch(function: Callable[[], Any]) -> Prepared:
    return Prepared(
        lambda: jnp.asarray(function().float().cpu().numpy()),
        lambda effort: _torch_seconds(function, effort),
    )


def _torch_seconds(function: Callable[[], Any], effort: timing.Effort) -> float:
    """Returns the median of the rounds, by the GPU's own clock."""
    torch = _torch()
    function()
    times = []
    for _ in range(effort.rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(effort.iterations):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / effort.iterations)
    return float(np.median(times))


Baseline = Callable[[Any, tuple[Any, ...]], Prepared]

BASELINES: Mapping[str, Mapping[str, Baseline]] = {
    "attention": {
        "jax paged_attention": _jax_paged_attention,
        "tokamax dot_product_attention": _tokamax_attention,
        "torch scaled_dot_product_attention": _torch_attention,
    },
    "grouped_matmul": {
        "jax ragged_dot": _ragged_dot,
        "tokamax ragged_dot": _tokamax_ragged_dot,
        "torch grouped_mm": _torch_grouped_mm,
    },
    "norm_quantize": {
        "XLA": lambda step, given: _of_jax(norm_quantize.call(step, rms_norm_quantize), *given)
    },
}

"""Weights in FP8 with a scale a block, as DeepSeek-V3's files have them, by NumPy alone.

Used by the writer of tiny checkpoints. Shares no code with `pallas_kernels.quantize`.
"""

import ml_dtypes
import numpy as np

BLOCK = (128, 128)
"""Rows (outputs) and columns (inputs) of the file's matrix that share a scale."""

LARGEST = 448.0
"""The largest finite number of e4m3fn."""

_UNQUANTISED = ("embed_tokens.", "lm_head.", "norm.", "mlp.gate.", "moe.gate.", ".head.", "eh_proj")
_UNQUANTISED += ("weights_proj.", "conv1d.", "in_proj_a.", "in_proj_b", "shared_expert_gate.")


def is_quantised(name: str, tensor: np.ndarray) -> bool:
    """Whether released FP8 checkpoints store a tensor in FP8: all projections but a few."""
    matrix = tensor.ndim > 1 and name.endswith(".weight")
    return matrix and not any(part in name for part in _UNQUANTISED)


def block_quantise(
    tensors: dict[str, np.ndarray], *, dequantised: bool = False
) -> dict[str, np.ndarray]:
    """Every projection as `X.weight` in e4m3fn and `X.weight_scale_inv`; the rest in BF16.

    A matrix [..., out, in] has the scales FP32 [..., ceil(out / 128), ceil(in / 128)].

    Args:
      tensors: FP32, by name in the checkpoint.
      dequantised: give the FP32 values that the file stands for instead, and no scales.
    """
    written: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not is_quantised(name, tensor):
            # The router's bias is FP32 in the released files too.
            exact = name.endswith("e_score_correction_bias")
            stored = tensor if exact else tensor.astype(ml_dtypes.bfloat16)
            written[name] = stored.astype(np.float32) if dequantised else stored
            continue
        scales = block_scales(tensor)
        spread = spread_scales(scales, tensor.shape)
        values = (tensor / spread).astype(ml_dtypes.float8_e4m3fn)
        if dequantised:
            written[name] = values.astype(np.float32) * spread
        else:
            written |= {name: values, f"{name}_scale_inv": scales}
    return written


def block_scales(tensor: np.ndarray) -> np.ndarray:
    """Divisor of the values of a block: its largest magnitude becomes 448."""
    *_, rows, columns = tensor.shape
    pad = [(0, 0)] * (tensor.ndim - 2) + [(0, -rows % BLOCK[0]), (0, -columns % BLOCK[1])]
    padded = np.pad(np.abs(tensor), pad)
    *lead, rows, columns = padded.shape
    blocks = padded.reshape(*lead, rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
    return (blocks.max(axis=(-3, -1)) / LARGEST).astype(np.float32)


def spread_scales(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Each element's own scale, [..., out, in]."""
    spread = scales.repeat(BLOCK[0], axis=-2).repeat(BLOCK[1], axis=-1)
    return spread[..., : shape[-2], : shape[-1]]

"""Batches for `chunk_attention`, and what NumPy makes of them."""

import numpy as np

SCALE, HEADS, DIM, V_DIM, TOKENS = 0.3, 2, 6, 4, 32


def attend_numpy(queries, keys, values, sequence, position):
    """Each token over the batch's tokens of its sequence that do not come after it, float64."""
    tokens, heads, _ = queries.shape
    output = np.zeros((tokens, heads, values.shape[2]))
    lse = np.full((tokens, heads), -np.inf)
    for token in range(tokens):
        if position[token] < 0:
            continue
        seen = (sequence == sequence[token]) & (position >= 0) & (position <= position[token])
        for head in range(heads):
            scores = SCALE * keys[seen, head].astype(np.float64) @ queries[token, head]
            weights = np.exp(scores - scores.max())
            output[token, head] = weights @ values[seen, head] / weights.sum()
            lse[token, head] = scores.max() + np.log(weights.sum())
    return output, lse


def batch(rng, lengths, starts, tokens=TOKENS):
    """Chunks of several sequences, then padding full of NaN that claims the last sequence."""
    count = sum(lengths)
    shapes = ((HEADS, DIM), (HEADS, DIM), (HEADS, V_DIM))
    arrays = [rng.normal(size=(tokens, *shape)).astype(np.float32) for shape in shapes]
    for array in arrays:
        array[count:] = np.nan
    sequence = np.full(tokens, len(lengths) - 1, np.int32)
    sequence[:count] = np.repeat(np.arange(len(lengths)), lengths)
    position = np.full(tokens, -1, np.int32)
    position[:count] = np.concatenate(
        [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    )
    return *arrays, sequence, position

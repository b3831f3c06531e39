"""`work_items` against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.work_items import work_items

TOKENS, SEQUENCES = 24, 4

compiled = jax.jit(work_items, static_argnames=("sequences", "largest"))


def items_by_loop(sequence_of_token, position, largest):
    """(first, count, sequence, kv_length, stride) of every item, greedily."""
    items = []
    for token, (sequence, place) in enumerate(zip(sequence_of_token, position, strict=True)):
        if place < 0:
            continue
        if items:
            first, count, owner, length, stride = items[-1]
            step = place + 1 - length
            neighbour = first + count == token and owner == sequence and count < largest
            if neighbour and (step == stride if count > 1 else step in (0, 1)):
                items[-1] = (first, count + 1, owner, place + 1, step)
                continue
        items.append((token, 1, sequence, place + 1, 1))
    return items


def run(sequence_of_token, position, largest):
    where = (jnp.asarray(array, jnp.int32) for array in (sequence_of_token, position))
    items = compiled(*where, sequences=SEQUENCES, largest=largest)
    total = int(items.total[0])
    fields = np.asarray(items[:5])
    assert not fields[1, total:].any()
    padding = [token for token, place in enumerate(position) if place < 0]
    assert fields[0, total : total + len(padding)].tolist() == padding
    return [tuple(map(int, column)) for column in fields[:, :total].T]


def test_sequences_outside_of_the_table_are_clamped_into_it():
    assert run([-3, 99], [4, 5], 4) == [(0, 1, 0, 5, 1), (1, 1, SEQUENCES - 1, 6, 1)]


@settings(max_examples=200)
@given(data=st.data(), largest=st.sampled_from([1, 2, 8]))
def test_chunks(data, largest):
    """Batches as an engine makes them: chunks one after the other, then padding."""
    sequence, position = [], []
    for owner in range(SEQUENCES):
        count = data.draw(st.integers(0, TOKENS // SEQUENCES))
        start = data.draw(st.integers(0, 50))
        stride = data.draw(st.sampled_from([0, 1]))
        sequence += [owner] * count
        position += [start + stride * index for index in range(count)]
    padding = TOKENS - len(sequence)
    sequence, position = sequence + [SEQUENCES - 1] * padding, position + [-1] * padding
    assert run(sequence, position, largest) == items_by_loop(sequence, position, largest)


@settings(max_examples=200)
@given(
    sequence=st.lists(st.integers(0, 1), min_size=TOKENS, max_size=TOKENS),
    steps=st.lists(st.sampled_from([0, 1, 1, 1, 2, -1]), min_size=TOKENS, max_size=TOKENS),
    largest=st.sampled_from([1, 3]),
)
def test_any_batch(sequence, steps, largest):
    """Every token in one item, which says its sequence and position."""
    position = np.cumsum(steps) - 1
    items = run(sequence, position, largest)
    told = [
        (first + index, owner, length - 1 - (count - 1 - index) * stride)
        for first, count, owner, length, stride in items
        for index in range(count)
    ]
    known = enumerate(zip(sequence, position, strict=True))
    assert told == [(token, owner, place) for token, (owner, place) in known if place >= 0]
    assert all(1 <= item[1] <= largest and item[4] in (0, 1) for item in items)

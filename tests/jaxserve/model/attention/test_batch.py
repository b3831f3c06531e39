import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.model.attention.batch import ragged_batch
from tests import golden

build = jax.jit(ragged_batch, static_argnums=3)


def batch_of(query_start, kv_length, tokens):
    table = jnp.zeros((len(kv_length), 2), jnp.int32)
    batch = build(
        jnp.asarray(query_start, jnp.int32), jnp.asarray(kv_length, jnp.int32), table, tokens
    )
    assert batch.page_table.shape == table.shape
    return np.asarray(batch.sequence_of_token).tolist(), np.asarray(batch.position).tolist()


@golden.table("model/batch_steps.yaml")
def test_literal_steps(query_start, kv_length, sequence, position):
    assert batch_of(query_start, kv_length, len(sequence)) == (sequence, position)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=5, max_size=5))
def test_every_token_of_every_slot(slots):
    """`slots`: new tokens and tokens already cached. 20 tokens a step, the rest is padding."""
    expected = [(slot, cached + i) for slot, (new, cached) in enumerate(slots) for i in range(new)]
    expected += [(4, -1)] * (20 - len(expected))
    query_start = np.cumsum([0, *(new for new, _ in slots)])
    kv_length = [new + cached if new else 0 for new, cached in slots]
    sequence, position = batch_of(query_start, kv_length, 20)
    assert list(zip(sequence, position, strict=True)) == expected

"""An ffn worker's passes over messages of several domains, on two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.fleet.ffn_runtime import message_server
from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.dispatch.message import message_formats
from jaxserve.model.message import DispatchMessage
from tests.jaxserve.fleet.test_domains import FFN, role_of

ROWS = 4


def messages(contract, kind, pieces, count):
    """Random messages, each a list of packed pieces."""
    form, random = message_formats(contract)[kind], np.random.default_rng(pieces)

    def piece():
        tokens = jnp.asarray(random.standard_normal((ROWS, contract.d_model)), jnp.float32)
        if not form.top_k:
            return np.asarray(form.pack(DispatchMessage(tokens, None, None)))
        experts = np.argsort(random.random((ROWS, contract.experts)))[:, : form.top_k]
        gates = jnp.asarray(random.random(experts.shape), jnp.float32)
        return np.asarray(form.pack(DispatchMessage(tokens, jnp.asarray(experts), gates)))

    return [[piece() for _ in range(pieces)] for _ in range(count)]


@pytest.mark.parametrize(
    ("exchange", "dispatch"),
    [("gather", "float32"), ("alltoall", "int8"), ("gather", "fp8"), ("alltoall", "bfloat16")],
)
def test_an_answer_does_not_depend_on_the_other_messages_of_a_pass(tiny_model, exchange, dispatch):
    """Three or 99 messages, and padding up to a power of two, for which no expert counts a token.
    Their pieces fill two devices or do not."""
    many = 99 if dispatch == "bfloat16" else 3
    overrides = FFN | {
        "link.addresses": ["127.0.0.1:1"], "link.dispatch": dispatch, "ffn.exchange": exchange,
    }  # fmt: skip
    role, *rest = role_of(tiny_model, "ffn", 0, overrides)
    _, work = message_server(role, *rest, "a secret", "127.0.0.1:0")
    for pieces in (2, 3) if dispatch == "float32" else (1,):
        size = MessageSize(pieces, ROWS)
        sizes = [size._replace(messages=count) for count in (1, 1 << many.bit_length())]
        work.compile(sizes)
        assert work.ready(sizes)
        work.warm_up(sizes)
        for kind in dict.fromkeys(role.contract.layers):
            layer = role.contract.layers.index(kind)
            sent = messages(role.contract, kind, pieces, many)
            landed = [work.land(kind, size, one) for one in sent]
            before = tokens(work)
            alone = [work.run(kind, layer, size, [one])[0] for one in landed]
            counted = tokens(work) - before
            together = work.run(kind, layer, size, landed)
            assert [len(answer) for answer in together] == [pieces] * many
            # Products of other shapes differ in their last bits.
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
            jax.tree.map(close, together, alone)
            assert tokens(work) - before == 2 * counted
            top_k = role.contract.top_k if kind == "moe" else 0
            assert counted == many * pieces * ROWS * top_k


def tokens(work) -> int:
    """Tokens that all experts have got so far."""
    return sum(int(np.sum(counts)) for counts in work._worker.slots.counts)

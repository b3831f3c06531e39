"""Several ffn workers that each have some of the experts."""

from unittest.mock import Mock

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet.ffn_shard import experts_of
from tests.jaxserve.fleet.test_domains import FFN, SHARDS, open_domain, role_of, serving

ADDRESSES = [f"a:{port}" for port in range(1, 9)]


def test_experts_are_divided_evenly():
    assert [list(experts_of(7, 4, shard)) for shard in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights.peers": ["a:9"]}, "not from weights.peers"),
        ({"ffn.ep": 8, "ffn.instances": 8, "link.addresses": ADDRESSES}, "has 7 routed experts"),
    ],
)
def test_what_a_shard_cannot_do_is_refused(tiny_model, changes, said):
    with pytest.raises(ConfigError, match=said):
        role_of(tiny_model, "ffn", 0, FFN | SHARDS | changes)


def test_the_address_of_another_shard_is_refused(tiny_model):
    with (
        serving(tiny_model, SHARDS, 1, 1) as second,
        pytest.raises(ConfigError, match="instance = 0 of 2, here 1 of 2"),
    ):
        open_domain(tiny_model, second, "one lane", 4, SHARDS, [Mock(address="127.0.0.1:1")])

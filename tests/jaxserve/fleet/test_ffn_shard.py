"""Several ffn workers that each have some of the experts."""

from unittest.mock import Mock

import pytest

from jaxserve.errors import ConfigError
from tests.jaxserve.fleet.test_domains import FFN, SHARDS, open_domain, role_of, serving


def test_what_a_shard_cannot_do_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="storage, not from"):
        role_of(tiny_model, "ffn", 0, FFN | SHARDS | {"weights.peers": ["a:9"]})
    eight = {"ffn.ep": 8, "ffn.instances": 8, "link.addresses": [f"a:{n}" for n in range(1, 9)]}
    with pytest.raises(ConfigError, match="the model has 7 routed experts"):
        role_of(tiny_model, "ffn", 0, FFN | eight)


def test_the_address_of_another_shard_is_refused(tiny_model):
    refused = pytest.raises(ConfigError, match="instance = 0 of 2, here 1 of 2")
    with serving(tiny_model, SHARDS, 1, 1) as second, refused:
        open_domain(tiny_model, second, "one lane", 4, SHARDS, [Mock(address="127.0.0.1:1")])

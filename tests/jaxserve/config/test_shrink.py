"""Sizes of a role on what is left of its devices."""

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shrink import shrunk
from jaxserve.errors import ConfigError
from tests import golden
from tests.conftest import REPOSITORY

PULL = {"attention.dp": 4, "attention.tp": 2, "ffn.ep": 8, "ffn.tp": 4, "ffn.runtime": "f"}
PULL |= {"attention.runtime": "a", "link.transport": "pull", "link.addresses": ["h:1"]}


@golden.table("config/shrunk.yaml")
def test_rows_of_a_mesh_are_given_up_first(role, devices, sizes):
    changed = shrunk(load_deployment(REPOSITORY, PULL), role, devices)
    found = (changed.ffn.ep, changed.ffn.tp), (changed.attention.dp, changed.attention.tp)
    assert found == (((*sizes,), (4, 2)) if role == "ffn" else ((8, 4), (*sizes,)))


def test_what_cannot_shrink():
    with pytest.raises(ConfigError, match="--devices 0: expected at least 1"):
        shrunk(load_deployment(REPOSITORY, PULL), "ffn", 0)
    together = load_deployment(REPOSITORY, {"attention.dp": 2, "ffn.ep": 2})
    with pytest.raises(ConfigError, match="only a role with a runtime of its own, or colocated"):
        shrunk(together, "attention", 1)
    alone = load_deployment(REPOSITORY, {"mode": "colocated", "attention.dp": 4})
    assert shrunk(alone, "attention", 3).attention.dp == 3


def test_what_is_left_must_fit():
    """One of two ranks has the shared expert: the other one's experts have nowhere to go."""
    shared = load_deployment(REPOSITORY, PULL | {"ffn.ep": 2, "ffn.tp": 1, "ffn.shared": "ranks:1"})
    problem = r"ffn.shared = ranks:1 of ffn.ep = 1 ranks leaves none"
    with pytest.raises(ConfigError, match=problem):
        shrunk(shared, "ffn", 1)

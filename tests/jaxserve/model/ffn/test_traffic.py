"""The exchanges' bytes, as worked out by hand, by counting, and as auto decides by them."""

import itertools
import re

import numpy as np
import pytest

from jaxserve.commands.checking import describe_exchange
from jaxserve.config.deployment import Deployment
from jaxserve.config.sections import FFNRole, Link
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.block import check_ffn
from jaxserve.model.ffn.traffic import (
    ExchangeMesh,
    Moved,
    alltoall_moves,
    choose,
    exchange_mesh,
    exchange_of,
    gather_moves,
    ranks_met,
    reach,
)
from jaxserve.model.row_width import RowBytes, row_bytes
from tests import golden
from tests.jaxserve.roles.test_capacity import load

DEEPSEEK = RowBytes(packed=7168 + 128, result=2 * 7168)
"""An FP8 row with its scale, eight ids and gates, filled up to whole tiles; BF16 results."""


@pytest.mark.parametrize(("parts", "share"), [(2, 0.9965), (4, 0.9036), (8, 0.6618)])
def test_reach_of_published_vectors(parts, share):
    assert reach(256, 8, parts) == pytest.approx(share, abs=5e-5)


@pytest.mark.parametrize(
    ("experts", "top_k", "parts"), [(6, 2, 3), (8, 3, 2), (8, 3, 8), (4, 4, 2)]
)
def test_reach_is_what_counting_all_choices_gives(experts, top_k, parts):
    choices = list(itertools.combinations(range(experts), top_k))
    local = experts // parts
    met = [len({expert // local for expert in choice}) for choice in choices]
    assert reach(experts, top_k, parts) * parts == pytest.approx(np.mean(met))


def test_rows_of_deepseek():
    assert row_bytes(7168, 8, "fp8", "bfloat16") == DEEPSEEK
    back = RowBytes(7168 + 128, result=7168 + 128, added=2 * 7168)
    assert row_bytes(7168, 8, "fp8", "bfloat16", "int8") == back
    assert row_bytes(100, 3, "float32", "float32") == RowBytes(4 * (100 + 6), 400)


def test_devices_of_their_own():
    mesh = ExchangeMesh(ranks=4, tensor=2, attention=8)
    row = RowBytes(packed=100, result=20)
    assert gather_moves(mesh, row) == Moved(7 * 100, 7 * 20)
    assert alltoall_moves(mesh, row, 0.5, shared=False) == Moved(3.5 * 100, 3.5 * 20)
    # The shared expert needs the rows of the other device of the rank, and gives a sum back.
    assert alltoall_moves(mesh, row, 0.5, shared=True) == Moved(450, 70 + 20)
    # Every device has all of it.
    whole = mesh._replace(whole=True)
    assert alltoall_moves(whole, row, 0.5, shared=True) == Moved(3.5 * 100, 3.5 * 20)
    alone = ExchangeMesh(ranks=8, tensor=1, attention=8)
    assert alltoall_moves(alone, row, 0.5, shared=True) == Moved(350, 70)


def test_ranks_of_the_shared_expert_get_rows_and_spare_the_gather():
    mesh = ExchangeMesh(ranks=4, tensor=2, attention=8, shared=1)
    row = RowBytes(packed=100, result=20)
    assert alltoall_moves(mesh, row, 0.5, shared=True) == Moved(3.5 * 100, 3.5 * 20)
    assert ranks_met(mesh, 6, 2) == pytest.approx(3 * reach(6, 2, 3) + 1)
    assert ranks_met(mesh._replace(shared=0), 6, 2) == pytest.approx(4 * reach(6, 2, 4))


def test_ep_288_is_256_and_32():
    """xDeepServe §4.5: a token has rows on 8 ranks of routed experts, and on one of the others;
    each of either kind multiplies 1/32 of all rows."""
    sizes = {"attention_dp": 160, "attention_tp": 1, "ffn_ep": 288, "ffn_tp": 1}
    config, deployment = load("deepseek-v3", **sizes, ffn_shared="ranks:32")
    assert ranks_met(exchange_mesh(deployment), 256, 8) == pytest.approx(9)
    said = describe_exchange(config, deployment)[2]
    assert re.match(r"288 ranks = 256 .* 0\.031 rows a token .*\+ 32 .*: 0\.031$", said)


def test_colocated_devices_of_a_group_have_the_same_rows():
    mesh = ExchangeMesh(ranks=4, tensor=2, attention=None)
    row = RowBytes(packed=100, result=20)
    # Both devices of a group have half of every sum: an all-reduce of own rows.
    assert gather_moves(mesh, row) == Moved(300, 3 * 20 + 20)
    assert alltoall_moves(mesh, row, 0.5, shared=True) == Moved(150, 1.5 * 20 + 20)
    # INT8 cannot be added up on the way.
    assert gather_moves(mesh, row._replace(result=12, added=20)) == Moved(300, 3 * 12 + 20)


@pytest.mark.parametrize(
    ("ranks", "platform", "kind"),
    [(8, "tpu", "gather"), (16, "tpu", "alltoall"), (16, "cpu", "alltoall"), (16, "gpu", "gather")],
)
def test_auto_of_deepseek(ranks, platform, kind):
    mesh = ExchangeMesh(ranks, 1, attention=8)
    assert choose(mesh, DEEPSEEK, reach(256, 8, ranks), True, platform) == kind


def test_auto_of_the_shipped_deployments():
    golden.check_values("model/exchanges.txt", lambda name: exchange_of(*load(name)), globals())


def test_description_names_both():
    lines = describe_exchange(*load("qwen3-235b-a22b"))
    assert re.findall(r"[\d.]+ KB", lines[0]) == ["29.6 KB", "57.3 KB", "19.7 KB", "38.3 KB"]
    assert lines[1].endswith("experts on 5.34 of 8 ranks")
    assert describe_exchange(*load("qwen3-32b")) == []
    (said,) = describe_exchange(*load("step3-alltoall"))[2:]
    assert "NCCL 2.29" in said
    assert said.endswith("tested at start")
    tpus = {"attention_hardware": "v6e", "ffn_hardware": "v6e"}
    assert len(describe_exchange(*load("step3-alltoall", **tpus))) == 2
    assert len(describe_exchange(*load("step3-alltoall", ffn_exchange="gather"))) == 2
    lines = describe_exchange(*load("qwen3-235b-a22b", link_combine="int8"))
    assert re.findall(r"[\d.]+ KB", lines[0]) == ["29.6 KB"] * 2 + ["19.7 KB"] * 2


def test_refusals():
    def call(name, **changes):
        check_ffn(*load(name, ffn_exchange="alltoall", **changes))

    golden.check_arguments("model/alltoall.txt", ConfigError, call, globals())


def test_broadcast_gathers():
    config, _ = load("deepseek-v3")
    wide = Deployment(model="", ffn=FFNRole(ep=16), link=Link(route="broadcast"))
    assert exchange_of(config, wide) == "gather"


@pytest.mark.parametrize(
    ("attention", "own"), [(None, 1 / 4), (8, 1 / 8), (16, 2 / 16), (12, 2 / 12), (2, 1 / 2)]
)
def test_rows_that_a_device_has_room_for(attention, own):
    """Eight devices: as many pieces as attention devices, each on one of them."""
    assert ExchangeMesh(ranks=4, tensor=2, attention=attention).own == own


def test_instances_have_all_rows_each():
    mesh = ExchangeMesh(ranks=4, tensor=2, attention=8, instances=2)
    assert mesh.peers == 4
    assert mesh.own == 2 / 8

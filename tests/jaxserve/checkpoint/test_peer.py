"""Weights that come from a running worker are those of the checkpoint, bit for bit, whatever the
layouts at the two ends; what it does not have, or does not live to give, comes from storage."""

import contextlib
import threading
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.peer import PeerCheckpoint, open_weights, weights_hello
from jaxserve.errors import CheckpointError
from jaxserve.link.weights.client import PIECE_BYTES, PeerError, WeightsPeer, pieces
from jaxserve.link.weights.frames import HeldArray
from jaxserve.link.weights.server import WeightsServer
from jaxserve.model.ffn.placement import home_slots
from jaxserve.roles.held_weights import HeldWeights
from pallas_kernels import input_major
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.checkpoint.opened import Opened, check_same, leaves_of
from tests.jaxserve.checkpoint.test_fp8 import MODEL as FP8_MODEL
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

TOKEN = "secret"
LAYOUTS = {
    "1A1F": {},
    "2A3F": {"mode": "afd", "attention.dp": 2, "ffn.ep": 3, "ffn.redundant_slots": 1},
    "2A4F": {"mode": "afd", "attention.tp": 2, "ffn.ep": 2, "ffn.tp": 2},
    "colocated": {"mode": "colocated"},
    "colocated on 4": {"mode": "colocated", "attention.dp": 2, "attention.tp": 2},
}


class Loaded(NamedTuple):
    leaves: list[jax.Array]
    held: HeldWeights


def load(folder, overrides, source=None, *, on_cpus=False) -> Loaded:
    """A worker's weights, with a prediction module, in the order of the leaves."""
    opened = Opened(folder, overrides, modules=1, on_cpus=on_cpus, source=source)
    weights = opened.weights()
    homes = dict.fromkeys(range(opened.config.all_layers), home_slots(opened.templates.slots))
    slots = SimpleNamespace(changing=threading.Lock(), placements=homes)
    held = [block for each in weights for block in each.held]
    return Loaded(leaves_of(weights), HeldWeights(held, slots))


@contextlib.contextmanager
def serving(folder, holder, *, rate=1e12):
    server = WeightsServer(
        "127.0.0.1:0", weights_hello(str(folder)), TOKEN, holder, bytes_per_second=rate
    )
    try:
        yield server.start()
    finally:
        server.close()


def from_peers(folder, *addresses, modules=0) -> PeerCheckpoint:
    _, names = read_config(folder, modules=modules)
    hello = weights_hello(str(folder))
    # the tests' workers live in one process
    hello = type(hello)(worker="new", facts=hello.facts)
    return PeerCheckpoint(
        list(addresses), hello, TOKEN, names, lambda: open_checkpoint(folder, names)
    )


def check_from(folder, overrides, *addresses, on_cpus=False) -> dict[str, int]:
    """Loads from these peers and compares with storage; returns the number of arrays by source."""
    source, sizes = from_peers(folder, *addresses, modules=1), []
    source.on_read = sizes.append
    found = load(folder, overrides, source, on_cpus=on_cpus).leaves
    source.close()
    assert sum(sizes) > 0
    check_same(load(folder, overrides, on_cpus=on_cpus).leaves, found)
    return source.arrays


@pytest.fixture(scope="module")
def step3(tmp_path_factory):
    return write_tiny_step3(tmp_path_factory.mktemp("step3"), TinyStep3(mtp=True), shards=2)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return FP8_MODEL.write(tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize(
    ("theirs", "ours", "weights"),
    [("2A3F", "colocated on 4", "auto"), ("colocated on 4", "2A4F", "int8")],
)
def test_other_layout(theirs, ours, weights, step3):
    formats = {"attention.weights": weights, "ffn.weights": weights, "dtype": "bfloat16"}
    peer = load(step3, LAYOUTS[theirs] | formats)
    with serving(step3, peer.held) as address:
        assert check_from(step3, LAYOUTS[ours] | formats, address).keys() == {address}


@golden.table("checkpoint/tiles_of_peers.yaml")
def test_tiles(theirs, tiled, ours, tiled_here, step3, monkeypatch):
    """Float matrices on CPUs are tiled, those of several widths."""
    monkeypatch.setattr(input_major, "TILE", 16)
    peer = load(step3, LAYOUTS[theirs], on_cpus=tiled)
    with serving(step3, peer.held) as address:
        arrays = check_from(step3, LAYOUTS[ours], address, on_cpus=tiled_here)
        assert arrays.keys() == {address}


def test_a_part_of_a_tile(step3, monkeypatch):
    monkeypatch.setattr(input_major, "TILE", 16)
    rows, tiles = (load(step3, {}, on_cpus=tiled).held for tiled in (False, True))
    (d_out, d_in) = rows.held()["head"]["weight"].shape
    for ranges in [((3, 5), (0, d_in)), ((15, 50), (7, 9)), ((0, d_out), (0, d_in))]:
        expected = rows.read("head", "weight", ranges)
        np.testing.assert_array_equal(tiles.read("head", "weight", ranges), expected)


def test_ranks_of_the_shared_expert(tmp_path):
    """Expert slots are put together from storage; other arrays may come from peers."""
    model = write_tiny_step3(tmp_path, TinyStep3(mtp=True, share_expert_dim=32))
    apart, layout = {"ffn.ep": 3, "ffn.shared": "ranks:1"}, {"ffn.ep": 2}
    for theirs, ours in ((layout, apart), (apart, layout)):
        with serving(model, load(model, theirs).held) as address:
            arrays = check_from(model, ours, address)
        assert arrays[address] > arrays["storage"] > 0


def test_blocks_of_fp8_stay(fp8):
    formats = {"dtype": "bfloat16"}
    peer = load(fp8, LAYOUTS["1A1F"] | formats)
    with serving(fp8, peer.held) as address:
        assert check_from(fp8, LAYOUTS["colocated"] | formats, address).keys() == {address}
        # Blocks of other sizes come from storage.
        assert check_from(fp8, LAYOUTS["2A4F"] | formats, address)["storage"] > 0


def test_other_formats_come_from_storage(step3):
    peer = load(step3, {"attention.weights": "int8"})
    with serving(step3, peer.held) as address:
        arrays = check_from(step3, {"ffn.weights": "int8"}, address)
    # Norms, embedding, head and router are the same in both.
    assert 0 < arrays["storage"] < sum(arrays.values())
    assert arrays.keys() == {address, "storage"}


class Dying:
    """Holds weights, and ends its server after `reads` reads."""

    def __init__(self, held: HeldWeights, reads: int):
        self._held, self._left = held, reads
        self.end = lambda: None

    def held(self):
        return self._held.held()

    def warm_up(self): ...

    def read(self, block, leaf, ranges):
        self._left -= 1
        if self._left < 0:
            self.end()
            raise OSError("ended")
        return self._held.read(block, leaf, ranges)


@pytest.mark.parametrize(("reads", "second"), [(0, False), (7, False), (40, True)])
def test_a_peer_dies(reads, second, step3):
    peer = load(step3, LAYOUTS["2A3F"])
    dying = Dying(peer.held, reads)
    with serving(step3, dying) as first, serving(step3, peer.held) as other:
        arrays = check_from(step3, LAYOUTS["2A4F"], first, *[other] * second)
    rest = other if second else "storage"
    assert arrays.keys() == ({first, rest} if reads > 1 else {rest})
    assert arrays[rest] > 0


def test_a_connection_is_used_while_it_is_fresh(step3, monkeypatch):
    with serving(step3, load(step3, {}).held) as address:
        source = from_peers(step3, address)
        (first,) = source._peers
        source._look()
        assert source._peers == [first]
        monkeypatch.setattr("jaxserve.checkpoint.peer.FRESH_SECONDS", 0.0)
        source._look()
        assert source._peers != [first]
        source.close()


def test_who_is_refused(step3, fp8, tmp_path):
    """The same revision on another disk is the same, its conversion is another one."""
    other = write_tiny_step3(tmp_path / "other", TinyStep3(mtp=True), seed=2)
    convert(step3, tmp_path / "converted", "int8")
    with serving(step3, load(step3, {}).held) as address:
        for folder, token, message in (
            (fp8, TOKEN, r"model = deepseek_v3, here step3_text"),
            (step3, "wrong", "another token"),
            (other, TOKEN, r"configured differently.*: revision = "),
            (tmp_path / "converted", TOKEN, "revision"),
        ):
            with pytest.raises(PeerError, match=message):
                WeightsPeer(address, weights_hello(str(folder)), token)
        connection = WeightsPeer(address, weights_hello(str(step3)), TOKEN)
        with pytest.raises(PeerError, match=r"has no part \(\(0, 9999\)"):
            connection.read("head", "norm", ((0, 9999),), np.empty(9999, np.float32))
        connection.close()
    gone = layouts.deployment(step3, {"weights.peers": [address]})
    open_weights(gone, read_config(step3)[1], token=TOKEN)


def test_nobody_and_no_storage(step3, tmp_path):
    (tmp_path / "config.json").write_bytes((step3 / "config.json").read_bytes())
    source = open_weights(
        layouts.deployment(step3, {"weights.peers": ["127.0.0.1:9"]}),
        read_config(step3)[1],
        token="",
    )
    assert isinstance(source, PeerCheckpoint)
    with pytest.raises(CheckpointError):
        weights_hello(str(tmp_path / "none"))


def test_pieces():
    rows = HeldArray((6, 1024, 1024), "float32")
    cut = list(pieces(rows, ((0, 6), (0, 1024), (0, 1024)), 4))
    assert cut == [((n, n + 1), (0, 1024), (0, 1024)) for n in range(6)]
    cut = list(pieces(rows, ((2, 3), (0, 1000), (0, 2048)), 4))
    assert cut == [((2, 3), (0, 512), (0, 2048)), ((2, 3), (512, 1000), (0, 2048))]
    assert all((b - a) * 2048 * 4 <= PIECE_BYTES for _, (a, b), _ in cut)
    apart = HeldArray((3, 2), "int8", apart=True)
    assert list(pieces(apart, ((1, 3), (0, 2)), 1)) == [((1, 2), (0, 2)), ((2, 3), (0, 2))]
    assert list(pieces(rows, ((1, 1), (0, 2), (0, 2)), 4)) == []


def test_parts_cut_on_the_device(monkeypatch, step3):
    """Stands for accelerators, whose memory cannot be read in place."""
    peer = load(step3, LAYOUTS["2A4F"])
    shape = peer.held.held()["layers.1.attention"]["attention.up"].shape
    ranges = ((1, shape[0] - 1), (0, shape[1]))
    here = peer.held.read("layers.1.attention", "attention.up", ranges)
    from jaxserve.roles import held_weights

    overlaps = held_weights._overlaps
    monkeypatch.setattr(
        held_weights, "_overlaps", lambda array, where, apart: overlaps(array, where, apart=True)
    )
    cut = peer.held.read("layers.1.attention", "attention.up", ranges)
    np.testing.assert_array_equal(here, cut)
    assert jnp.dtype(jnp.float32).itemsize * np.prod([b - a for a, b in ranges]) == cut.size

"""The bench of weights from a running worker, on a small model, without the worker's process."""

from jaxserve.bench import peers
from jaxserve.bench.load import config_tree, write_checkpoint
from jaxserve.checkpoint.peer import weights_hello
from jaxserve.link.weights.server import WeightsServer


def test_a_worker_gives_everything(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, config_tree(True))
    peers.forget(tmp_path)
    held = peers.held_by(peers.load_in("auto", tmp_path))
    hello = weights_hello(str(tmp_path))
    theirs = type(hello)(worker="other", facts=hello.facts, digest=hello.digest)
    server = WeightsServer("127.0.0.1:0", theirs, "", held, bytes_per_second=1e12)
    assert peers.from_worker(tmp_path, "auto", server.start()) > 0
    server.close()

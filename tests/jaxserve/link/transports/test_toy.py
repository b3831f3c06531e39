"""A new transport is one file: configuration, links and `doctor` find it by its declaration."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

TOYS = {
    "toy": """
import jax
from jaxserve.config.topology import Transport
from jaxserve.link.dispatch.mesh_transport import MeshTransport

TRANSPORT = Transport(collective=True)

class Toy(MeshTransport):
    def prepare(self):
        pass

    def copier(self):
        return lambda arrays: [jax.device_put(one, self.destination_sharding) for one in arrays]

OPENS = Toy
""",
    "far": """
from jaxserve.config.topology import Transport
from jaxserve.link.transports.pull import PullTransfers

TRANSPORT = Transport(crosses_runtimes=True)

class Far(PullTransfers):
    registered = 0

    def register(self, uuid, arrays):
        Far.registered += 1
        super().register(uuid, arrays)

OPENS = Far
""",
}
USE = """
import jax, numpy as np
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.commands.doctor_probe import probe
from jaxserve.config.load import load_deployment
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.ends import piece_sharding
from jaxserve.link.remote.client import MessageClient
from jaxserve.link.remote.server import MessageServer
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.link.session.hello import make_hello
from jaxserve.link.transports import opens
from jax.sharding import Mesh

near = load_deployment("demo", {"mode": "afd", "link.transport": "toy"})
apart = {"ffn.runtime": "ffn", "link.addresses": ["127.0.0.1:1"]}
far = load_deployment("demo", {"mode": "afd", "link.transport": "far", **apart})
assert near.topology.transport.collective and not near.topology.crosses_runtimes
assert far.topology.crosses_runtimes

here, there = (Mesh(np.array([[device]]), ("a", "tp")) for device in jax.devices()[:2])
contract = Contract(groups=1, attention_devices=1, d_model=4, top_k=0, experts=0,
                    layers=("dense",), dispatch="float32", combine="float32")
link = RuntimeLink("toy", contract, here, there, [2])
assert type(link.dispatch(0, 2)) is opens("toy")
width = link.dispatch(0, 2).piece[1]
message = jax.device_put(np.arange(2 * width, dtype=np.uint32).reshape(2, -1), piece_sharding(here))
link.attention.sender(0, 2, 0)(message)
(arrived,) = link.ffn.receiver(0, 2)()
assert arrived.devices() == {jax.devices()[1]} and np.array_equal(arrived, message)

class Echo:
    def ready(self, sizes):
        return True

    def shapes(self, kind, size):
        return [jax.ShapeDtypeStruct((2, width), "uint32", sharding=piece_sharding(there))]

    def run(self, kind, layer, size, message):
        return message

server = MessageServer("127.0.0.1:0", make_hello("ffn", {}), "", Echo(), transport="far",
                       mesh=there)
shape = jax.ShapeDtypeStruct((2, width), "uint32", sharding=piece_sharding(here))
client = MessageClient([server.start()], make_hello("attention", {}), "", domain="d",
                       transport="far", mesh=here, answer_shape=lambda *_: shape, rows=[2])
client.connect()
client.send(0, "dense", 0, 2, message)
assert np.array_equal(client.receive(0), message)
assert opens("far").registered >= 4, "probe and message, both ways"
client.close()
server.close()
assert {name: probe()["links"][name] for name in ("toy", "far")} == {"toy": True, "far": True}
print("served", flush=True)
import os; os._exit(0)  # an ordinary exit would wait for the transfer servers
"""


def overlay(folder: Path, *parts: str) -> Path:
    """A copy of the package that links to every file, with a real folder `parts` in it."""
    source, target = REPOSITORY.joinpath(*parts), folder.joinpath(*parts)
    if len(parts) > 1:
        overlay(folder, *parts[:-1])
        target.unlink()
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "__pycache__":
            (target / path.name).symlink_to(path)
    return target


def test_a_transport_is_one_file(tmp_path):
    folder = overlay(tmp_path, "jaxserve", "link", "transports")
    for name, text in TOYS.items():
        (folder / f"{name}.py").write_text(text)
    new = {path.name for path in tmp_path.rglob("*.py") if not path.is_symlink()}
    assert new == {"toy.py", "far.py"}
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout == "served\n", ran.stderr

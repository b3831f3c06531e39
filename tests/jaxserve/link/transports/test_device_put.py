"""Both transports on simulated devices: what arrives lies where the route says, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.config.topology import INSIDE
from jaxserve.link.dispatch.ends import piece_sharding
from jaxserve.link.dispatch.route import Route
from jaxserve.link.transports import device_put, opens
from jaxserve.link.transports.device_put import DevicePutTransport, public_copy

PIECE = (2, 5)

# 8 devices. A mesh of (4, 1) and one of (2, 2) differ in their axes, not in their order.
MESHES = [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (1, 2)), ((3, 1), (2, 1))]
MESHES += [((1, 2), (2, 2)), ((2, 2), (2, 2)), ((1, 3), (5, 1)), ((5, 1), (3, 1))]
TRANSPORTS = [opens(name) for name in INSIDE]


def meshes(attention: tuple[int, int], ffn: tuple[int, int]) -> tuple[Mesh, Mesh]:
    devices, cut = np.asarray(jax.devices()), attention[0] * attention[1]
    return (
        Mesh(devices[:cut].reshape(attention), ("dp", "tp")),
        Mesh(devices[cut : cut + ffn[0] * ffn[1]].reshape(ffn), ("ep", "tp")),
    )


def pieces(count: int, dtype, first: int = 0) -> np.ndarray:
    """Every word another one."""
    size = count * PIECE[0] * PIECE[1]
    return (first + np.arange(size)).astype(dtype).reshape(count, *PIECE)


def on_mesh(mesh: Mesh, values: np.ndarray) -> jax.Array:
    return jax.device_put(values.reshape(-1, PIECE[1]), piece_sharding(mesh))


def by_device(array: jax.Array, mesh: Mesh) -> np.ndarray:
    assert array.sharding == piece_sharding(mesh)
    return np.asarray(array).reshape(mesh.size, *PIECE)


@pytest.mark.parametrize("cls", TRANSPORTS)
@pytest.mark.parametrize(("attention", "ffn"), MESHES, ids=str)
def test_a_message_and_its_answer(attention, ffn, cls):
    a, f = meshes(attention, ffn)
    route = Route(a.size, f.size)
    dispatch = cls("dispatch", route, a, f, PIECE, jnp.dtype(np.uint8))
    sent = pieces(a.size, np.uint8)
    message = on_mesh(a, sent)
    dispatch.sender()(message)
    arrived = [by_device(array, f) for array in dispatch.receiver()()]
    assert len(arrived) == route.slots
    for piece in range(a.size):
        device, slot = route.ingress(piece)
        np.testing.assert_array_equal(arrived[slot][device], sent[piece])
    np.testing.assert_array_equal(by_device(message, a), sent)  # the sender keeps what it has

    combine = cls("combine", route, a, f, PIECE, jnp.dtype(np.float32))
    answers = [pieces(f.size, np.float32, first=1000 * slot) for slot in range(route.slots)]
    combine.sender()(*(on_mesh(f, answer) for answer in answers))
    (back,) = combine.receiver()()
    for piece, got in enumerate(by_device(back, a)):
        device, slot = route.ingress(piece)
        np.testing.assert_array_equal(got, answers[slot][device])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("cls", TRANSPORTS)
def test_every_word(cls, dtype):
    a, f = meshes((3, 1), (2, 1))
    sent = pieces(3, dtype)
    copy = cls("dispatch", Route(3, 2), a, f, PIECE, jnp.dtype(dtype)).copier()
    first, second = copy((on_mesh(a, sent),))
    np.testing.assert_array_equal(by_device(first, f), sent[[0, 2]])
    np.testing.assert_array_equal(by_device(second, f)[0], sent[1])


@pytest.mark.parametrize("cls", TRANSPORTS)
def test_messages_in_flight_keep_their_order(cls):
    a, f = meshes((2, 1), (1, 1))
    transport = cls("dispatch", Route(2, 1), a, f, PIECE, jnp.dtype(np.int32))
    send, receive = transport.sender(), transport.receiver()
    for n in range(50):
        send(on_mesh(a, np.full((2, *PIECE), n, np.int32)))
    for n in range(50):
        assert {int(value) for array in receive() for value in np.asarray(array).flat} == {n}


def test_the_public_copy_will_do(monkeypatch):
    monkeypatch.setattr(device_put, "fast_copy", lambda: public_copy)
    test_a_message_and_its_answer((3, 1), (2, 1), DevicePutTransport)
    test_a_message_and_its_answer((2, 1), (2, 1), DevicePutTransport)


@pytest.mark.parametrize(
    ("attention", "ffn", "copies"), [(4, 4, 1), (1, 7, 1), (2, 6, 1), (5, 2, 3)]
)
def test_copies_of_a_message(attention, ffn, copies, monkeypatch):
    """One for all devices of the other side, as long as each gets one piece."""
    made = []

    def counting(sharding):
        copy = public_copy(sharding)
        return lambda arrays: made.append(len(arrays)) or copy(arrays)

    monkeypatch.setattr(device_put, "fast_copy", lambda: counting)
    a, f = meshes((attention, 1), (ffn, 1))
    route = Route(attention, ffn)
    transport = DevicePutTransport("dispatch", route, a, f, PIECE, jnp.dtype(np.uint8))
    transport.copier()((on_mesh(a, pieces(attention, np.uint8)),))
    assert made == [1] * copies

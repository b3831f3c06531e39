"""Both transports on simulated devices: what arrives is what the route says, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.link import transport as transport_module
from jaxserve.link.route import Route, combine_route, dispatch_route
from jaxserve.link.transport import (
    fast_copy,
    make_transport,
    piece_sharding,
    public_copy,
)

PIECE = (2, 5)

# 8 devices. A mesh of (4, 1) and one of (2, 2) differ in their axes, not in their order.
MESHES = [
    ((1, 1), (1, 1)),
    ((2, 1), (1, 1)),
    ((1, 1), (1, 2)),
    ((3, 1), (2, 1)),
    ((1, 2), (2, 2)),
    ((2, 2), (2, 2)),
    ((1, 3), (5, 1)),
]


def meshes(attention: tuple[int, int], ffn: tuple[int, int]) -> tuple[Mesh, Mesh]:
    devices, cut = np.asarray(jax.devices()), attention[0] * attention[1]
    return (
        Mesh(devices[:cut].reshape(attention), ("dp", "tp")),
        Mesh(devices[cut : cut + ffn[0] * ffn[1]].reshape(ffn), ("ep", "tp")),
    )


def messages(route: Route, mesh: Mesh, dtype) -> tuple[list[np.ndarray], list[jax.Array]]:
    """Every word of every array another one."""
    size = route.senders * PIECE[0] * PIECE[1]
    sent = [
        (np.arange(size) + 251 * output).astype(dtype).reshape(route.senders * PIECE[0], PIECE[1])
        for output in range(route.sends)
    ]
    return sent, [jax.device_put(array, piece_sharding(mesh)) for array in sent]


def expected(route: Route, sent: list[np.ndarray]) -> list[np.ndarray]:
    received = [np.zeros((route.receivers, *PIECE), sent[0].dtype) for _ in range(route.receives)]
    for source, output, destination, into in route.edges:
        received[into][destination] = sent[output].reshape(-1, *PIECE)[source]
    return [array.reshape(-1, PIECE[1]) for array in received]


@pytest.mark.parametrize("kind", ["device_put", "ppermute"])
@pytest.mark.parametrize("route_kind", ["trampoline", "broadcast"])
@pytest.mark.parametrize(("attention", "ffn"), MESHES, ids=str)
def test_what_arrives(attention, ffn, route_kind, kind):
    a, f = meshes(attention, ffn)
    for route, source, destination, dtype in (
        (dispatch_route(a.size, f.size, route_kind), a, f, np.uint8),
        (combine_route(a.size, f.size, route_kind), f, a, np.float32),
    ):
        transport = make_transport(kind, route, source, destination, PIECE, jnp.dtype(dtype))
        sent, outputs = messages(route, source, dtype)
        received = transport(outputs)
        assert len(received) == route.receives
        for array, value in zip(received, expected(route, sent), strict=True):
            assert array.sharding == piece_sharding(destination)
            assert array.dtype == dtype
            np.testing.assert_array_equal(np.asarray(array), value)
        for array, value in zip(outputs, sent, strict=True):  # the sender keeps what it has
            np.testing.assert_array_equal(np.asarray(array), value)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kind", ["device_put", "ppermute"])
def test_every_word(kind, dtype):
    a, f = meshes((3, 1), (2, 1))
    route = dispatch_route(3, 2, "trampoline")
    sent, outputs = messages(route, a, dtype)
    received = make_transport(kind, route, a, f, PIECE, jnp.dtype(dtype))(outputs)
    for array, value in zip(received, expected(route, sent), strict=True):
        np.testing.assert_array_equal(np.asarray(array), value)


@pytest.mark.parametrize("kind", ["device_put", "ppermute"])
def test_trampoline_keeps_the_rows_in_order(kind):
    """Side by side, the pieces on the ffn devices are the rows on the attention devices."""
    a, f = meshes((3, 1), (2, 1))
    route = dispatch_route(3, 2, "trampoline")
    rows = np.arange(6 * PIECE[0] * PIECE[1], dtype=np.float32).reshape(-1, PIECE[1])
    pieces = rows.reshape(3, 2, *PIECE)  # device, output
    outputs = [
        jax.device_put(pieces[:, output].reshape(-1, PIECE[1]), piece_sharding(a))
        for output in range(2)
    ]
    received = make_transport(kind, route, a, f, PIECE, jnp.dtype(jnp.float32))(outputs)
    on_devices = [[np.asarray(array.addressable_data(d)) for array in received] for d in range(2)]
    np.testing.assert_array_equal(np.concatenate([np.concatenate(p) for p in on_devices]), rows)


@pytest.mark.parametrize("kind", ["device_put", "ppermute"])
def test_messages_in_flight_do_not_mix(kind):
    a, f = meshes((2, 1), (1, 1))
    route = dispatch_route(2, 1, "trampoline")
    transport = make_transport(kind, route, a, f, PIECE, jnp.dtype(np.int32))
    outputs = [[jax.device_put(np.full((4, 5), n, np.int32), piece_sharding(a))] for n in range(50)]
    received = [transport(arrays) for arrays in outputs]
    for n, arrays in enumerate(received):
        assert {int(value) for array in arrays for value in np.asarray(array).flat} == {n}


class TestFastCopy:
    """`fast_copy` without its memory of an earlier answer."""

    select = staticmethod(fast_copy.__wrapped__)

    @pytest.fixture
    def probe(self):
        return jax.device_put(np.arange(3.0), jax.devices()[0])

    def works(self, make_copy, x):
        sharding = SingleDeviceSharding(jax.devices()[3])
        (arrived,) = make_copy(sharding)([x])
        assert arrived.sharding == sharding
        np.testing.assert_array_equal(np.asarray(arrived), np.asarray(x))

    def test_private_copy_where_it_is_as_expected(self, probe):
        assert self.select() is transport_module._private_copy
        self.works(transport_module._private_copy, probe)

    def test_public_copy(self, probe):
        self.works(public_copy, probe)

    @pytest.mark.parametrize(
        "error", [ImportError, AttributeError, TypeError, ValueError, RuntimeError]
    )
    def test_missing_or_changed_function(self, error, monkeypatch, probe):
        def changed(sharding):
            raise error("not as it was")

        monkeypatch.setattr(transport_module, "_private_copy", changed)
        assert self.select() is public_copy

    def test_function_is_gone(self, monkeypatch):
        from jax._src.lib import xla_client

        monkeypatch.delattr(xla_client, "batched_copy_array_to_devices_with_sharding")
        assert self.select() is public_copy

    def test_function_has_other_arguments(self, monkeypatch):
        from jax._src.lib import xla_client

        name = "batched_copy_array_to_devices_with_sharding"
        monkeypatch.setattr(xla_client, name, lambda arrays, devices: arrays)
        assert self.select() is public_copy

    @pytest.mark.parametrize(
        "copy",
        [
            lambda x, sharding: None,
            lambda x, sharding: np.asarray(x),
            lambda x, sharding: x,
            lambda x, sharding: jax.device_put(x + 1, sharding),
            lambda x, sharding: jax.device_put(x[:3], sharding),
        ],
        ids=["nothing", "another type", "not moved", "other values", "another shape"],
    )
    def test_function_gives_something_else(self, copy, monkeypatch):
        monkeypatch.setattr(
            transport_module,
            "_private_copy",
            lambda sharding: lambda arrays: [copy(x, sharding) for x in arrays],
        )
        assert self.select() is public_copy

    def test_transport_with_the_public_copy(self, monkeypatch):
        monkeypatch.setattr(transport_module, "fast_copy", lambda: public_copy)
        for sides in (((3, 1), (2, 1)), ((2, 1), (2, 1))):
            a, f = meshes(*sides)
            route = dispatch_route(a.size, f.size, "trampoline")
            sent, outputs = messages(route, a, np.int32)
            received = make_transport("device_put", route, a, f, PIECE, jnp.dtype(np.int32))(
                outputs
            )
            for array, value in zip(received, expected(route, sent), strict=True):
                np.testing.assert_array_equal(np.asarray(array), value)

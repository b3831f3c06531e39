"""The private functions prove themselves, or the public ones are taken."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.link.dispatch import put as put_module
from jaxserve.link.dispatch import shards as shards_module
from jaxserve.link.dispatch.put import fast_put, public_put
from jaxserve.link.dispatch.shards import fast_shards, public_assemble, public_shards
from jaxserve.link.transports import device_put as copy_module
from jaxserve.link.transports.device_put import fast_copy, fast_first, public_copy

# Each `fast_…` is tried without its memory of an earlier answer.
select_copy, select_shards, select_put, select_first = (
    function.__wrapped__ for function in (fast_copy, fast_shards, fast_put, fast_first)
)
VALUES = np.arange(12, dtype=np.int32).reshape(6, 2)


@pytest.mark.parametrize(
    "error", [ImportError, AttributeError, TypeError, ValueError, RuntimeError]
)
@pytest.mark.parametrize(
    ("name", "select", "public"),
    [
        ("_private_copy", select_copy, public_copy),
        ("_private_shards", select_shards, (public_shards, public_assemble)),
        ("_private_assemble", select_shards, (public_shards, public_assemble)),
        ("_private_put", select_put, public_put),
    ],
)
def test_a_function_that_is_missing_or_has_changed(name, select, public, error, monkeypatch):
    def changed(*arguments):
        raise error("not as it was")

    modules = {select_copy: copy_module, select_shards: shards_module, select_put: put_module}
    monkeypatch.setattr(modules[select], name, changed)
    assert select() == public


def sharding_of(first: int) -> NamedSharding:
    """Rows on three devices."""
    mesh = Mesh(np.array(jax.devices()[first : first + 3]), ("x",))
    return NamedSharding(mesh, PartitionSpec("x"))


def check_usable(whole, sharding) -> None:
    """The array has all values, and a program takes it."""
    assert whole.sharding == sharding
    np.testing.assert_array_equal(np.asarray(whole), VALUES)
    doubled = jax.jit(lambda x: 2 * x, out_shardings=sharding)(whole)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * VALUES)


class TestFastCopy:
    @pytest.mark.parametrize("make_copy", [copy_module._private_copy, public_copy])
    def test_works(self, make_copy):
        assert select_copy() is copy_module._private_copy
        x = jax.device_put(np.arange(3.0), jax.devices()[0])
        sharding = SingleDeviceSharding(jax.devices()[3])
        (arrived,) = make_copy(sharding)([x])
        assert arrived.sharding == sharding
        np.testing.assert_array_equal(np.asarray(arrived), np.asarray(x))

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
            copy_module,
            "_private_copy",
            lambda sharding: lambda arrays: [copy(x, sharding) for x in arrays],
        )
        assert select_copy() is public_copy


PRIVATE_SHARDS = shards_module._private_shards, shards_module._private_assemble


@pytest.mark.parametrize("pair", [PRIVATE_SHARDS, (public_shards, public_assemble)])
def test_shards_and_back(pair):
    assert select_shards() == PRIVATE_SHARDS
    shards_of, make_assemble = pair
    sharding = sharding_of(2)
    shards = shards_of(jax.device_put(VALUES, sharding))
    assert [shard.devices() for shard in shards] == [{d} for d in jax.devices()[2:5]]
    check_usable(make_assemble((6, 2), VALUES.dtype, sharding)(list(shards)), sharding)


class TestFastPut:
    def test_shards_of_other_devices_make_up_an_array(self):
        sharding = sharding_of(2)
        rows = [jax.device_put(VALUES[2 * n : 2 * n + 2], jax.devices()[5 + n]) for n in range(3)]
        check_usable(select_put()((6, 2), VALUES.dtype, sharding)(rows), sharding)
        np.testing.assert_array_equal(np.asarray(rows[1]), VALUES[2:4])  # the sender keeps its own

    def test_something_else_arrives(self, monkeypatch):
        monkeypatch.setattr(put_module, "_private_put", lambda *of: lambda arrays: arrays[0] + 1)
        assert select_put() is public_put


@pytest.mark.parametrize("changed", [None, lambda x: x.missing, lambda x: x, lambda x: x[1:]])
def test_the_first_shard(changed, monkeypatch):
    if changed is not None:
        monkeypatch.setattr(copy_module, "_private_first", changed)
    first_of = select_first()
    assert (first_of is copy_module._private_first) == (changed is None)
    first = first_of(jax.device_put(VALUES, sharding_of(3)))
    assert first.devices() == {jax.devices()[3]}
    np.testing.assert_array_equal(np.asarray(first), VALUES[:2])

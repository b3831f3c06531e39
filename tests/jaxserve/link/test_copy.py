"""The private copy proves itself, or the public one is taken."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.link import copy as copy_module
from jaxserve.link.copy import fast_copy, fast_first, fast_put, fast_shards, public_copy


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
        assert self.select() is copy_module._private_copy
        self.works(copy_module._private_copy, probe)

    def test_public_copy(self, probe):
        self.works(public_copy, probe)

    @pytest.mark.parametrize(
        "error", [ImportError, AttributeError, TypeError, ValueError, RuntimeError]
    )
    def test_missing_or_changed_function(self, error, monkeypatch, probe):
        def changed(sharding):
            raise error("not as it was")

        monkeypatch.setattr(copy_module, "_private_copy", changed)
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
            copy_module,
            "_private_copy",
            lambda sharding: lambda arrays: [copy(x, sharding) for x in arrays],
        )
        assert self.select() is public_copy


class TestFastShards:
    """`fast_shards` without its memory of an earlier answer."""

    select = staticmethod(fast_shards.__wrapped__)

    def works(self, pair):
        shards_of, make_assemble = pair
        mesh = Mesh(np.array(jax.devices()[2:5]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        values = np.arange(12, dtype=np.int32).reshape(6, 2)
        array = jax.device_put(values, sharding)
        shards = shards_of(array)
        assert [shard.devices() for shard in shards] == [{d} for d in jax.devices()[2:5]]
        whole = make_assemble((6, 2), array.dtype, sharding)(list(shards))
        assert whole.sharding == sharding
        np.testing.assert_array_equal(np.asarray(whole), values)
        doubled = jax.jit(lambda x: 2 * x, out_shardings=sharding)(whole)
        np.testing.assert_array_equal(np.asarray(doubled), 2 * values)

    def test_private_where_it_is_as_expected(self):
        pair = self.select()
        assert pair == (copy_module._private_shards, copy_module._private_assemble)
        self.works(pair)

    def test_public(self):
        self.works((copy_module.public_shards, copy_module.public_assemble))

    @pytest.mark.parametrize("name", ["_private_shards", "_private_assemble"])
    @pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError, ValueError])
    def test_missing_or_changed(self, name, error, monkeypatch):
        def changed(*arguments):
            raise error("not as it was")

        monkeypatch.setattr(copy_module, name, changed)
        assert self.select() == (copy_module.public_shards, copy_module.public_assemble)


class TestFastPut:
    """`fast_put` without its memory of an earlier answer."""

    select = staticmethod(fast_put.__wrapped__)

    def test_shards_of_other_devices_make_up_an_array(self):
        make_put = self.select()
        mesh = Mesh(np.array(jax.devices()[2:5]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        values = np.arange(12, dtype=np.int32).reshape(6, 2)
        rows = [jax.device_put(values[2 * n : 2 * n + 2], jax.devices()[5 + n]) for n in range(3)]
        whole = make_put((6, 2), values.dtype, sharding)(rows)
        assert whole.sharding == sharding
        np.testing.assert_array_equal(np.asarray(whole), values)
        doubled = jax.jit(lambda x: 2 * x, out_shardings=sharding)(whole)
        np.testing.assert_array_equal(np.asarray(doubled), 2 * values)
        np.testing.assert_array_equal(np.asarray(rows[1]), values[2:4])  # the sender keeps its own

    @pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError, ValueError])
    def test_missing_or_changed(self, error, monkeypatch):
        def changed(*arguments):
            raise error("not as it was")

        monkeypatch.setattr(copy_module, "_private_put", changed)
        assert self.select() is None

    def test_something_else_arrives(self, monkeypatch):
        monkeypatch.setattr(copy_module, "_private_put", lambda *of: lambda arrays: arrays[0] + 1)
        assert self.select() is None


class TestFastFirst:
    """`fast_first` without its memory of an earlier answer."""

    select = staticmethod(fast_first.__wrapped__)

    def takes_the_first(self, first_of):
        mesh = Mesh(np.array(jax.devices()[3:6]), ("x",))
        values = np.arange(12, dtype=np.int32).reshape(6, 2)
        first = first_of(jax.device_put(values, NamedSharding(mesh, PartitionSpec("x"))))
        assert first.devices() == {jax.devices()[3]}
        np.testing.assert_array_equal(np.asarray(first), values[:2])

    def test_private_where_it_is_as_expected(self):
        assert self.select() is copy_module._private_first
        self.takes_the_first(copy_module._private_first)

    @pytest.mark.parametrize("changed", [lambda x: x.missing, lambda x: x, lambda x: x[1:]])
    def test_public(self, changed, monkeypatch):
        monkeypatch.setattr(copy_module, "_private_first", changed)
        first_of = self.select()
        assert first_of is not changed
        self.takes_the_first(first_of)

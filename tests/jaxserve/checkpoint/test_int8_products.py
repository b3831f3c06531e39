"""Which layers multiply in INT8: a list of the deployment, or one that was measured."""

import re

import pytest

from jaxserve.checkpoint.conversion import write_record
from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.int8_products import Int8Products, listed, read_model
from jaxserve.commands.checking import check
from jaxserve.errors import ConfigError
from jaxserve.storage.mirror import INT8_PRODUCTS
from tests import golden
from tests.jaxserve import layouts


def deployment(folder, wanted, cache="int8"):
    return layouts.deployment(folder, {"attention.int8_products": wanted, "cache.format": cache})


def test_a_list_makes_kinds_of_layers(tiny_model):
    config, _ = read_model(deployment(tiny_model, [1, 3]))
    assert [config.layer(layer).int8_products for layer in range(4)] == [False, True, False, True]
    for wanted in ("none", []):
        config, _ = read_model(deployment(tiny_model, wanted, "auto"))
        assert not any(kind.int8_products for kind in config.decoder)


@golden.table("checkpoint/int8_products.yaml")
def test_what_is_refused(tiny_model, wanted, cache, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(deployment(tiny_model, wanted, cache))


@pytest.mark.parametrize("wanted", ["all", [-1], [0.5]])
def test_what_is_no_list_of_layers(tiny_model, wanted):
    with pytest.raises(ConfigError, match=r"attention\.int8_products"):
        deployment(tiny_model, wanted)


def test_auto_reads_what_was_measured_with_these_weights(tmp_path):
    folder = layouts.write_model(tmp_path)
    wanted = deployment(folder, "auto")
    write_record(folder / INT8_PRODUCTS, Int8Products(revision(str(folder)).digest, [2], {}))
    decoder = read_model(wanted)[0].decoder
    assert [kind.int8_products for kind in decoder] == [False, False, True, False]
    assert listed(wanted).attention.int8_products == [2]
    assert listed(deployment(folder, [1])).attention.int8_products == [1]
    write_record(folder / INT8_PRODUCTS, Int8Products("others", [2], {}))
    with pytest.raises(ConfigError, match="is of the weights others, and here are "):
        read_model(wanted)

"""The table of number formats, and how many files know a format of the KV cache by name."""

import jax.numpy as jnp
import msgspec
import pytest

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.auto import page_tokens
from jaxserve.config.formats import FORMATS, NumberFormat, choices, scaled, sharing
from jaxserve.config.load import load_deployment
from jaxserve.model.attention.kv_cache import layer_entries, page_arrays
from jaxserve.model.matrix_formats import weight_format
from jaxserve.model.row_width import row_bytes
from jaxserve.planner.assumptions import Formats
from tests.jaxserve.config.test_topology import ROOT, compared
from tests.jaxserve.model.attention.test_kv_cache import GROUPED
from tests.jaxserve.planner.making import calculator


def test_what_each_use_offers():
    assert choices("weights") == ["float32", "bfloat16", "fp8", "int8", "int4", "mxfp4"]
    assert choices("dispatch") == choices("cache") == ["float32", "bfloat16", "fp8", "int8"]
    assert choices("stored") == ["fp8", "fp8_block", "int8", "int4", "mxfp4"]
    assert [name for name in (*FORMATS, "plain", "auto", "") if scaled(name)] == choices("stored")
    assert all(jnp.dtype(one.dtype).name == one.dtype for one in FORMATS.values())


def test_a_format_of_the_cache_is_one_entry(monkeypatch):
    """A toy format with 8 bits and a scale a token: pages, page size, wire and plans follow. Its
    pages are no uint8, which has the bits of e4m3: rows would be stored in that format."""
    toy = NumberFormat(8, "float8_e5m2", "bfloat16", {"cache": "token", "dispatch": "row"})
    monkeypatch.setitem(FORMATS, "toy", toy)
    deployment = load_deployment("demo")
    cache = msgspec.structs.replace(deployment.cache, format="toy")
    deployment = msgspec.structs.replace(deployment, cache=cache)
    arrays = page_arrays(deployment, layer_entries(GROUPED, GROUPED.attentions()[0], deployment))
    assert [array.dtype for array in arrays] == [jnp.float8_e5m2] * 2 + [jnp.float32] * 2
    assert page_tokens("tpu", "toy") == page_tokens("tpu", "int8") == 256
    assert row_bytes(256, 0, "toy", "float32") == row_bytes(256, 0, "int8", "float32")
    rows = [calculator(cache=name) for name in ("toy", "int8")]
    assert len({one.cache_row(one.model.attention[0], 1) for one in rows}) == 1


KNOWN = {"cache": ("cache format cache_format", 1), "stored": ("weights stored wanted", 4)}
"""Words for a format, by use, and files that compare one with a name; their number only falls."""


@pytest.mark.parametrize("use", KNOWN)
def test_a_format_is_no_edit_in_files_that_ask(use):
    subjects, known = KNOWN[use]
    given = tuple(subjects.split()), set(choices(use))
    word = subjects.split()[0]
    assert compared(f'a.{word} == "int8"\nx.{word} == "auto"\nx.other == "fp8"', *given) == [1]
    files = (ROOT / "jaxserve").rglob("*.py")
    found = [str(path) for path in files if compared(path.read_text(), *given)]
    assert len(found) <= known, found


def test_a_format_of_weights_is_one_entry(monkeypatch):
    """A toy format with 8 bits and a scale a channel: parts of layers and plans follow."""
    toy = NumberFormat(8, "float8_e5m2", "fp8", {"weights": "channel", "stored": "channel"})
    monkeypatch.setitem(FORMATS, "toy", toy)
    config = read_model(load_deployment("demo"))[0]
    assert [weight_format(name, config, "experts") for name in ("toy", "float32")] == [
        "toy",
        "plain",
    ]
    assert [sharing(name) for name in ("toy", "fp8_block", "int4", "plain", "bfloat16")] == [
        *("channel", "block", "group", "", "")
    ]
    blocks = msgspec.structs.replace(config, stored="fp8_block")
    kept = [weight_format(name, blocks, "experts") for name in ("fp8", "int8", "toy")]
    assert kept == ["fp8_block", "int8", "toy"]
    assert Formats(weights="toy").weight_bytes == Formats(weights="int8").weight_bytes

"""Weights in a bucket are those of the folder; of a large matrix only what is wanted is read."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.reading import Region, read_regions
from jaxserve.checkpoint.store import StoreCheckpoint
from jaxserve.checkpoint.tensors import list_tensors
from jaxserve.checkpoint.verification import verify
from jaxserve.config.load import load_deployment
from jaxserve.errors import CheckpointError
from jaxserve.storage.mirror import _mirrored, local_folder
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.checkpoint.opened import Opened, check_same
from tests.jaxserve.checkpoint.test_store import LAYOUTS, load
from tests.jaxserve.storage.conftest import objects as objects
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_step3(tmp_path_factory.mktemp("m") / "step3", TinyStep3(mtp=True), shards=2)


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("c") / "int8"
    convert(folder, target, "int8")
    return target


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.nightly)])
def test_the_folder_s_weights(scheme, folder, objects):
    objects.upload(folder, "step3")
    url, overrides = f"{scheme}://models/step3", LAYOUTS["2A3F"] | {"dtype": "float32"}
    assert load_deployment(url).model == url
    assert isinstance(open_checkpoint(url, read_config(url)[1]), HFCheckpoint)
    assert revision(url).digest != revision(str(folder)).digest  # named by generations
    assert not Tokenizer.from_folder(url).knows_text
    check_same(load(folder, overrides), load(url, overrides))


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.nightly)])
def test_a_converted_one_s(scheme, converted, objects):
    objects.upload(converted, "a/b/int8")
    url, overrides = f"{scheme}://models/a/b/int8", LAYOUTS["2A4F"]
    assert isinstance(open_checkpoint(url, read_config(url)[1]), StoreCheckpoint)
    assert revision(url).digest == revision(str(converted)).digest
    check_same(load(converted, overrides), load(url, overrides))
    assert verify(url) == []


@pytest.mark.nightly
def test_from_a_bucket_to_a_converted_folder(folder, converted, objects, tmp_path):
    objects.upload(folder, "step3")
    convert("s3://models/step3", tmp_path / "int8", "int8")
    found, expected = read_manifest(tmp_path / "int8"), read_manifest(converted)
    assert found.blocks == expected.blocks
    assert found.conversion.source == revision("s3://models/step3").digest  # by generations


def test_damage(converted, objects):
    objects.upload(converted, "int8")
    lost = next(name for name in objects.files if "/c/" in name)
    del objects.files[lost]
    (problem,) = verify("s3://models/int8")
    assert "cannot be read" in problem


def test_only_what_is_wanted(objects, tmp_path):
    """Rows of one host; columns of two of its devices, in one reading."""
    values = np.arange(400 * 20_000, dtype=np.float32).reshape(400, 20_000)
    save_file({"x": values}, tmp_path / "a.safetensors")
    objects.files["m/a.safetensors"] = (tmp_path / "a.safetensors").read_bytes()
    tensor = list_tensors(local_folder("s3://models/m")).tensors["x"]
    objects.ranges.clear()
    width = 20_000 * 4
    target = np.empty((150, 20_000), np.float32)
    sizes = []
    read_regions([Region(tensor, 200 * 20_000, 20_000, 150, 20_000, target)], sizes.append)
    np.testing.assert_array_equal(target, values[200:350])
    asked = sorted((start, stop) for _, start, stop in objects.ranges)
    assert (asked[0][0], asked[-1][1]) == (tensor.offset + 200 * width, tensor.offset + 350 * width)
    assert sum(stop - start for start, stop in asked) == sum(sizes) == 150 * width
    assert len(asked) <= 3

    objects.ranges.clear()
    halves = np.empty((2, 40, 1000), np.float32)
    parts = [Region(tensor, n * 1000, 20_000, 40, 1000, halves[n]) for n in range(2)]
    read_regions(parts, sizes.append)
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), values[:40, :2000])
    assert sum(stop - start for _, start, stop in objects.ranges) == 40 * 2000 * 4
    assert len(objects.ranges) == 40


def test_replaced_meanwhile(folder, objects):
    objects.upload(folder, "step3")
    url = "s3://models/step3"
    checkpoint = open_checkpoint(url, read_config(url)[1])
    for name in objects.files:
        if name.endswith(".safetensors"):
            objects.files[name] = objects.files[name][:-1] + b"?"
    tensor = next(iter(checkpoint._tensors.values()))
    target = np.empty((1, 4), tensor.dtype)
    with pytest.raises(CheckpointError, match="was replaced by another version since this process"):
        read_regions([Region(tensor, 0, 4, 1, 4, target)], len)


def test_a_converted_one_that_is_replaced(converted, objects):
    objects.upload(converted, "int8")
    url = "s3://models/int8"
    opened = Opened(url)
    objects.files["int8/manifest.json"] += b" "
    with pytest.raises(CheckpointError, match=r"manifest\.json was replaced by another version"):
        list(opened.head())


def test_problems_name_the_bucket(folder, objects):
    objects.upload(folder, "step3")
    cut = next(name for name in objects.files if name.endswith(".safetensors"))
    objects.files[cut] = objects.files[cut][:-5]
    _, names = read_config("s3://models/step3")
    with pytest.raises(CheckpointError, match=rf"s3://models/{cut}: truncated or no safetensors"):
        open_checkpoint("s3://models/step3", names)
    del objects.files["step3/config.json"]
    _mirrored.cache_clear()
    with pytest.raises(CheckpointError, match=re.escape("s3://models/step3: config.json: No such")):
        read_config("s3://models/step3")

"""A converted checkpoint gives the original's results, in every layout and format."""

import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import BLOCKS, MANIFEST
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.store import StoreCheckpoint
from jaxserve.errors import CheckpointError
from pallas_kernels.quantize.api import dequantize_weight
from tests import golden
from tests.jaxserve.checkpoint.opened import Opened, check_same, edit_config
from tests.jaxserve.checkpoint.test_conversion import damage
from tests.jaxserve.checkpoint.test_fp8 import MODEL as FP8_MODEL
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

LAYOUTS = {
    "2A4F": {"mode": "afd", "attention.dp": 2, "ffn.ep": 2, "ffn.tp": 2},
    "2A3F": {"mode": "afd", "attention.dp": 2, "ffn.ep": 3},
    "colocated on 4": {"mode": "colocated", "attention.dp": 2, "attention.tp": 2},
}
KEPT = {None: "auto", "bf16": "bfloat16", "fp8": "fp8", "int8": "int8"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Source folders of several kinds, and what they were converted to, made when asked for."""
    root = tmp_path_factory.mktemp("folders")
    sources = {
        "step3": write_tiny_step3(root / "step3", TinyStep3(mtp=True), shards=2),
        "fp8": FP8_MODEL.write(root / "fp8"),
    }
    made = {}

    def get(source, weights):
        if (source, weights) not in made:
            target = root / f"{source}-{weights}"
            convert(sources[source], target, weights)
            made[source, weights] = target
        return sources[source], made[source, weights]

    return get


def load(folder, overrides, modules=0):
    """All leaves, in the order of the weights; the checkpoint says how much it read."""
    opened, sizes = Opened(folder, overrides, modules=modules), []
    opened.source.on_read = sizes.append
    leaves = opened.leaves()
    assert sum(sizes) > 0
    return leaves


def conversions():
    """The whole product, of which nine run by default: every format from either source, every
    layout with both sources, and blocks kept as they are in two layouts. The others are behind
    `-m matrix`."""
    product = itertools.product(enumerate(["step3", "fp8"]), enumerate(KEPT), enumerate(LAYOUTS))
    for (i, source), (j, weights), (k, layout) in product:
        default = (i + j + k) % 3 == 0 or (source, weights, layout) == ("fp8", None, "2A4F")
        marks = [] if default else [pytest.mark.matrix]
        yield pytest.param(
            source, weights, LAYOUTS[layout], id=f"{source}-{weights}-{layout}", marks=marks
        )


@pytest.mark.parametrize(("source", "weights", "layout"), list(conversions()))
def test_as_it_was_converted(source, weights, layout, folders):
    original, converted = folders(source, weights)
    kept = KEPT[weights]
    formats = {"attention.weights": kept, "ffn.weights": kept}
    dtype = "float32" if (source, weights) == ("step3", None) else "bfloat16"
    if source == "step3" and weights in ("fp8", "int8"):
        dtype = "float32"
    expected = load(original, layout | formats | {"dtype": dtype}, modules=1)
    found = load(converted, layout | {"dtype": dtype}, modules=1)
    check_same(expected, found)


@pytest.mark.parametrize("asked", ["fp8", "int8"])
def test_plain_numbers_are_quantised_while_they_are_loaded(asked, folders):
    formats = {"attention.weights": asked, "ffn.weights": asked, "dtype": "float32"}
    layout = LAYOUTS["2A4F"] if asked == "fp8" else {"mode": "colocated"}
    check_same(*(load(folder, layout | formats) for folder in folders("step3", None)))


@pytest.mark.parametrize(
    ("weights", "asked"), [("int8", "float32"), ("fp8", "float32"), ("fp8", "int8")]
)
def test_in_another_format_than_it_was_converted(weights, asked, folders):
    _, converted = folders("step3", weights)
    formats = {"attention.weights": asked, "ffn.weights": asked}
    kept = {(at, name): matrix for at, name, matrix in Opened(converted).quantised()}
    assert kept
    opened = Opened(converted, LAYOUTS["2A4F"] | formats)
    if asked == "int8":
        assert {(at, name) for at, name, matrix in opened.quantised() if matrix.dtype == asked} == (
            kept.keys()
        )
        return
    for layer, _, leaves in opened.blocks():
        for name in leaves:
            if (matrix := kept.pop((layer, name), None)) is not None:
                wanted = np.asarray(dequantize_weight(matrix, jnp.float32))
                np.testing.assert_array_equal(np.asarray(leaves[name]), wanted)
    assert not kept


class TestProblems:
    @pytest.fixture
    def folder(self, folders, tmp_path):
        """A converted folder that a test may change."""
        return shutil.copytree(folders("step3", None)[1], tmp_path / "converted")

    def test_all_at_once(self, folder):
        path = folder / MANIFEST
        tree = json.loads(path.read_text())
        blocks = tree["blocks"]
        del blocks["layers.0.ffn"], blocks["layers.1.ffn"]["dense.up"]
        blocks["layers.9.ffn"] = {}
        blocks["head"]["norm"]["shape"] = [63]
        blocks["head"]["weight"]["dtype"] = "int8"
        blocks["embedding"]["more"] = blocks["embedding"]["table"]
        path.write_text(json.dumps(tree))
        (folder / BLOCKS / "layers.2.attention" / "input_norm" / "zarr.json").unlink()
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(folder, read_config(folder)[1])
        lines = str(error.value).replace(str(folder), "FOLDER").splitlines()
        golden.check("checkpoint/manifest.txt", "\n".join(sorted(lines)) + "\n")

    def test_another_config(self, folder):
        edit_config(folder, rope_theta=5e5)
        with pytest.raises(CheckpointError, match=r"config\.json is not what manifest\.json says"):
            read_config(folder)

    def test_a_plain_folder_is_none(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        _, names = read_config(folder)
        assert isinstance(open_checkpoint(folder, names), HFCheckpoint)
        with pytest.raises(CheckpointError, match="not a converted checkpoint"):
            StoreCheckpoint(folder, names)


class TestWhileLoading:
    def test_a_flipped_bit(self, folders, tmp_path):
        folder = shutil.copytree(folders("step3", None)[1], tmp_path / "copy")
        damage(folder, "head", "norm")
        opened = Opened(folder)
        list(opened.head())
        with pytest.raises(CheckpointError, match=r"head/norm has the checksum .* and should have"):
            opened.source.check()

    @pytest.mark.parametrize("replaced", ["chunk", "folder", "manifest"])
    def test_another_revision(self, folders, tmp_path, replaced):
        """The shapes are the same: only a comparison shows that the numbers are another model's."""
        folder = shutil.copytree(folders("step3", None)[1], tmp_path / "copy")
        opened = Opened(folder)
        assert len(list(opened.head())) == 2
        if replaced == "folder":
            folder.rename(tmp_path / "old")
            shutil.copytree(tmp_path / "old", folder)
        else:
            path = folder / MANIFEST
            if replaced == "chunk":
                chunks = (folder / BLOCKS / "head" / "norm" / "c").rglob("*")
                path = next(p for p in chunks if p.is_file())
            path.write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match="head was replaced by another version since"):
            list(opened.head())

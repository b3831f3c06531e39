"""What a converted checkpoint gives is what the original gives, in every layout and format."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import BLOCKS, MANIFEST
from jaxserve.checkpoint.store import StoreCheckpoint, open_checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.mesh import Submeshes
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.colocated_weights import ColocatedWeights
from pallas_kernels.quantize.api import QuantArray, dequantize_weight
from tests.jaxserve import layouts
from tests.jaxserve.both_roles import load_both
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
    """Template and leaves of every block, in the order of the weights."""
    deployment = layouts.deployment(folder, overrides)
    config, names = read_config(folder, modules=modules)
    meshes = Submeshes(deployment)
    templates = ModelTemplates(config, deployment, meshes)
    checkpoint = open_checkpoint(folder, names)
    sizes = []
    checkpoint.on_read = sizes.append
    if deployment.mode == "colocated":
        programs = ColocatedPrograms(templates, deployment, meshes.attention)
        weights = ColocatedWeights(checkpoint, names, programs)
        leaves = [*weights.flat, *weights.modules]
    else:
        leaves = load_both(checkpoint, names, templates, deployment, meshes).leaves
    assert sum(sizes) > 0
    return leaves


def bits(leaf):
    return np.asarray(leaf).view(np.uint8)


def conversions():
    """All of them, of which ten run by default: every format from either source, every layout with
    both sources and with three formats, and blocks kept as they are in every layout. The others are
    behind `-m matrix`."""
    product = itertools.product(enumerate(["step3", "fp8"]), enumerate(KEPT), enumerate(LAYOUTS))
    for (i, source), (j, weights), (k, layout) in product:
        default = (i + j + k) % 3 == 0 or (source, weights) == ("fp8", None)
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
    for a, b in zip(expected, found, strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        np.testing.assert_array_equal(bits(a), bits(b))


def other_formats():
    """By default each in one of the two layouts."""
    pairs = [
        (None, "fp8"),
        (None, "int8"),
        ("int8", "float32"),
        ("fp8", "float32"),
        ("fp8", "int8"),
    ]
    named = {"2A4F": LAYOUTS["2A4F"], "colocated": {"mode": "colocated"}}
    for (i, (weights, asked)), (j, name) in itertools.product(enumerate(pairs), enumerate(named)):
        marks = [pytest.mark.matrix] * ((i + j) % 2)
        yield pytest.param(weights, asked, named[name], id=f"{weights}-{asked}-{name}", marks=marks)


@pytest.mark.parametrize(("weights", "asked", "layout"), list(other_formats()))
def test_in_another_format_than_it_was_converted(weights, asked, layout, folders):
    original, converted = folders("step3", weights)
    formats = {"attention.weights": asked, "ffn.weights": asked, "dtype": "float32"}
    found = load(converted, layout | formats)
    if weights is None:  # quantised at once, or on the way
        expected = load(original, layout | formats)
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
        return
    stored = load(converted, layout | {"dtype": "float32"})
    if asked != "float32":
        assert [x.dtype for x in found] == [
            jnp.int8 if x.dtype == jnp.float8_e4m3fn else x.dtype for x in stored
        ]
        return
    matrices = [x for x in found if x.ndim > 1]
    pairs = [
        # Templates order the attributes: scales before values.
        QuantArray(values, scales, (1, 0))
        for scales, values in itertools.pairwise(stored)
        if values.dtype in (jnp.int8, jnp.float8_e4m3fn)
    ]
    assert pairs
    multiplied = [np.asarray(dequantize_weight(pair, jnp.float32)) for pair in pairs]
    for wanted in multiplied:
        assert any(wanted.shape == x.shape and (np.asarray(x) == wanted).all() for x in matrices)


class TestProblems:
    def converted(self, tmp_path):
        target = tmp_path / "converted"
        convert(write_tiny_step3(tmp_path / "source"), target)
        return target

    def message(self, folder):
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(folder, read_config(folder)[1])
        return str(error.value)

    def edit(self, folder, change):
        path = folder / MANIFEST
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    def test_all_at_once(self, tmp_path):
        folder = self.converted(tmp_path)

        def change(tree):
            blocks = tree["blocks"]
            del blocks["layers.0.ffn"]
            blocks["layers.9.ffn"] = {}
            blocks["head"]["norm"]["shape"] = [63]
            blocks["head"]["weight"]["dtype"] = "int8"
            blocks["embedding"]["more"] = blocks["embedding"]["table"]
            del blocks["layers.1.ffn"]["dense.up"]

        self.edit(folder, change)
        (folder / BLOCKS / "layers.2.attention" / "input_norm" / "zarr.json").unlink()
        assert sorted(self.message(folder).splitlines()[1:]) == sorted(
            f"  {line}"
            for line in (
                "missing block layers.0.ffn",
                "unexpected block layers.9.ffn",
                "head: norm is float32 [64], and the manifest says float32 [63]",
                "head: weight is float32 [160, 64], and the manifest says int8 [160, 64]",
                "unexpected embedding: more",
                f"{folder}/blocks/embedding/more: no array: it has no zarr.json",
                "missing layers.1.ffn: dense.up",
                f"{folder}/blocks/layers.2.attention/input_norm: no array: it has no zarr.json",
            )
        )

    def test_another_config(self, tmp_path):
        folder = self.converted(tmp_path)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 5e5}))
        with pytest.raises(CheckpointError, match=r"config\.json is not what manifest\.json says"):
            read_config(folder)

    def test_a_plain_folder_is_none(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        _, names = read_config(folder)
        assert isinstance(open_checkpoint(folder, names), HFCheckpoint)
        with pytest.raises(CheckpointError, match="not a converted checkpoint"):
            StoreCheckpoint(folder, names)


class TestWhileLoading:
    def opened(self, folder):
        config, names = read_config(folder)
        deployment = layouts.deployment(folder, {})
        templates = ModelTemplates(config, deployment, Submeshes(deployment))
        return StoreCheckpoint(folder, names), templates.head, names.head

    def read(self, checkpoint, template, sources):
        sharding = NamedSharding(Mesh(jax.devices()[:1], ("x",)), PartitionSpec())
        return list(checkpoint.leaves(template, sources, [sharding] * len(template.leaves)))

    def test_a_flipped_bit(self, folders, tmp_path):
        folder = shutil.copytree(folders("step3", None)[1], tmp_path / "copy")
        path = next(p for p in (folder / BLOCKS / "head" / "norm" / "c").rglob("*") if p.is_file())
        content = bytearray(path.read_bytes())
        content[50] ^= 1
        path.write_bytes(content)
        checkpoint, template, sources = self.opened(folder)
        self.read(checkpoint, template, sources)
        with pytest.raises(CheckpointError, match=r"head/norm has the checksum .* and should have"):
            checkpoint.check()

    @pytest.mark.parametrize("replaced", ["chunk", "folder", "manifest"])
    def test_another_revision(self, folders, tmp_path, replaced):
        """Of the same shapes: without a comparison its numbers would be taken for the model's."""
        folder = shutil.copytree(folders("step3", None)[1], tmp_path / "copy")
        checkpoint, template, sources = self.opened(folder)
        before = self.read(checkpoint, template, sources)
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
            self.read(checkpoint, template, sources)
        assert len(before) == len(template.leaves)

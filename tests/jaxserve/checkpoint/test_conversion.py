"""Conversions that are interrupted, damaged, repeated, or not possible."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint import conversion
from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.fingerprint import Revision
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import BLOCKS, CONVERSION, MANIFEST
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.verification import verify
from jaxserve.errors import CheckpointError
from tests import golden
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

BLOCK_NAMES = ["embedding", "head"] + [
    f"layers.{layer}.{role}" for layer in range(4) for role in ("attention", "ffn")
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = write_tiny_step3(tmp_path_factory.mktemp("model") / "source", shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("hi")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """A whole conversion; tests that change one get a copy."""
    target, sizes = tmp_path_factory.mktemp("whole") / "target", []
    convert(source, target, on_read=sizes.append)
    assert sum(sizes) == sum(np.prod(shape) * 4 for shape in TinyStep3().shapes().values())
    return target


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


@pytest.fixture
def complete(converted, target):
    return shutil.copytree(converted, target)


def notes_of(source, target, *arguments):
    notes = []
    convert(source, target, *arguments, on_block=lambda done, blocks, note: notes.append(note))
    return notes


def test_what_is_written(source, converted):
    assert {path.name for path in converted.iterdir()} == {
        *(BLOCKS, MANIFEST, "config.json", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    }
    manifest = json.loads((converted / MANIFEST).read_text())
    assert list(manifest["blocks"]) == BLOCK_NAMES
    made = {"format": 2, "source": Revision(source).digest, "weights": "plain"}
    assert manifest["conversion"] == made | {"dtype": "float32"}
    assert manifest["config"] == json.loads((source / "config.json").read_text())
    gate = manifest["blocks"]["layers.1.ffn"]["experts.gate"]
    assert gate == {"shape": [8, 32, 64], "dtype": "float32", "checksum": gate["checksum"]}
    assert verify(converted) == []


def test_orbax_reads_it(source, converted):
    block, name = "layers.1.ffn", "model.layers.1.moe.gate_proj.weight"
    leaves = json.loads((converted / MANIFEST).read_text())["blocks"][block]
    wanted = {leaf: ocp.RestoreArgs(restore_type=np.ndarray) for leaf in leaves}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(restore_args=wanted)
        found = checkpointer.restore(converted / BLOCKS / block, args=arguments)
    (stored,) = (
        tensors[name] for tensors in map(load_file, source.glob("*.safetensors")) if name in tensors
    )
    np.testing.assert_array_equal(found["experts.gate"], stored)


class TestInterrupted:
    @pytest.fixture(scope="class")
    @staticmethod
    def interrupted(source, tmp_path_factory):
        """A target whose fourth block could not be written."""
        write, target = conversion._write, tmp_path_factory.mktemp("half") / "target"

        def fail(folder, name, leaves, records):
            if name == BLOCK_NAMES[3]:
                raise OSError("no space left on device")
            write(folder, name, leaves, records)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion, "_write", fail)
            with pytest.raises(OSError, match="no space"):
                convert(source, target)
        return target

    @pytest.fixture
    def half(self, interrupted, target):
        return shutil.copytree(interrupted, target)

    def test_is_not_opened(self, half, source):
        assert not (half / MANIFEST).exists()
        with pytest.raises(CheckpointError, match=r"incomplete: no manifest\.json"):
            open_checkpoint(half, read_config(source)[1])
        with pytest.raises(CheckpointError, match=r"incomplete: no manifest\.json; run it again"):
            verify(half)

    def test_goes_on(self, half, source):
        notes = notes_of(source, half)
        assert notes == [f"{name} is there" for name in BLOCK_NAMES[:3]] + BLOCK_NAMES[3:]
        assert not (half / CONVERSION).exists()
        assert verify(half) == []

    def test_redoes_what_is_damaged(self, half, source):
        damage(half, "embedding", "table")
        (half / BLOCKS / "head.json").write_text("{")
        shutil.rmtree(half / BLOCKS / "layers.0.attention")
        assert notes_of(source, half) == BLOCK_NAMES
        assert verify(half) == []

    def test_refuses_other_options(self, half, source):
        message = r"is of another conversion: weights plain, and not int8$"
        with pytest.raises(CheckpointError, match=message):
            convert(source, half, "int8")

    def test_refuses_another_source(self, half, tmp_path):
        other = write_tiny_step3(tmp_path / "other", seed=1, shards=2)
        with pytest.raises(CheckpointError, match=r"is of another conversion: source \w+, and not"):
            convert(other, half)

    def test_leftovers_of_a_block_are_replaced(self, half, source):
        (half / BLOCKS / BLOCK_NAMES[5]).mkdir()
        (half / BLOCKS / BLOCK_NAMES[5] / "junk").write_text("half a block")
        convert(source, half)
        assert verify(half) == []


def damage(folder, block, leaf):
    """Changes one byte in the middle of an array."""
    path = next(p for p in (folder / BLOCKS / block / leaf / "c").rglob("*") if p.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


class TestComplete:
    def test_damage_is_named(self, complete):
        damage(complete, "layers.2.ffn", "experts.down")
        damage(complete, "head", "norm")
        (complete / BLOCKS / "layers.3.ffn" / "dense.up" / "zarr.json").unlink()
        (complete / "config.json").write_text("{}")
        metadata = complete / BLOCKS / "layers.3.ffn" / "dense.down" / "zarr.json"
        metadata.write_text(
            metadata.read_text()
            .replace("float32", "int32")
            .replace('"fill_value":0.0', '"fill_value":0')
        )
        first, *others = verify(complete)
        assert first == "config.json was changed"
        assert len(others) == 4
        assert others[0].startswith(f"head: norm: {complete}/blocks/head/norm has the checksum ")
        assert others[1].startswith("layers.2.ffn: experts.down: ")
        assert "experts.down has the checksum " in others[1]
        assert others[2].startswith("layers.3.ffn: dense.down is int32[")
        assert others[3].startswith("layers.3.ffn: dense.up: ")

    def test_again(self, source, complete, tmp_path):
        """The same source changes nothing, another one is refused."""
        before = (complete / MANIFEST).stat().st_mtime_ns
        assert notes_of(source, complete) == ["complete already"]
        other = write_tiny_step3(tmp_path / "other", seed=1, shards=2)
        with pytest.raises(CheckpointError, match="is of another conversion: source"):
            convert(other, complete)
        assert (complete / MANIFEST).stat().st_mtime_ns == before

    def test_with_another_chat_template(self, source, complete, tmp_path):
        changed = shutil.copytree(source, tmp_path / "changed")
        (changed / "chat_template.jinja").write_text("{{ messages }}")
        assert notes_of(changed, complete)[-1].endswith(" is there")
        assert (complete / "chat_template.jinja").read_text() == "{{ messages }}"
        assert verify(complete) == []
        assert notes_of(changed, complete) == ["complete already"]

    def test_a_converted_one_is_no_source(self, complete, tmp_path):
        with pytest.raises(CheckpointError, match="is converted already"):
            convert(complete, tmp_path / "third")


def test_two_at_a_time(source, target):
    def convert_again(done, blocks, note):
        with pytest.raises(CheckpointError, match="target: another process is converting to it"):
            convert(source, target)

    convert(source, target, on_block=convert_again)
    assert verify(target) == []


def test_a_target_that_is_something_else(source, target):
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is there, and not of a conversion"):
        convert(source, target)
    with pytest.raises(CheckpointError, match="is there, and not of a conversion"):
        convert(source, target / "thesis.tex")
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_no_source(target, tmp_path):
    with pytest.raises(CheckpointError, match="no model at"):
        convert(tmp_path / "none", target)
    assert not target.exists()


@golden.table("checkpoint/dtypes.yaml")
def test_dtype_of_what_is_not_quantised(stored, weights, dtype, target, tmp_path):
    convert(write_tiny_step3(tmp_path / "of", dtype=stored), target, weights)
    blocks = json.loads((target / MANIFEST).read_text())["blocks"]
    assert blocks["embedding"]["table"]["dtype"] == dtype
    assert blocks["head"]["weight"]["dtype"] == dtype

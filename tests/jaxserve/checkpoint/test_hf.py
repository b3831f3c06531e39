"""Hugging Face folders: good ones in all forms, and what is said of bad ones."""

import ast
import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.arrays import block_of
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.errors import CheckpointError, ConfigError
from pallas_kernels.quantize.api import quantize_weight
from tests import golden
from tests.jaxserve.checkpoint.opened import Opened, changed, check_same, edit_config
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3


def open_folder(folder) -> HFCheckpoint:
    _, names = read_config(folder)
    return HFCheckpoint(folder, names)


def all_leaves(folder, overrides=None):
    """Every leaf of every block."""
    return Opened(folder, overrides).leaves()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return all_leaves(write_tiny_step3(tmp_path_factory.mktemp("plain")))


NORM = "model.layers.4.enorm.weight"


def without_modules(folder, but=None):
    """Takes the tensors of the prediction module away, except one."""
    with changed(folder) as tensors:
        for name in [name for name in tensors if name.startswith("model.layers.4.")]:
            if name != but:
                del tensors[name]


class TestForms:
    """Folders of the same weights."""

    @pytest.mark.parametrize(
        "form",
        [{"vision": True}, {"moe_layers_as": list}, {"shards": 3}, {"vision": True, "shards": 2}],
        ids=str,
    )
    def test_of_the_folder(self, form, plain, tmp_path):
        check_same(plain, all_leaves(write_tiny_step3(tmp_path, **form)))

    def test_shards_without_an_index(self, plain, tmp_path):
        folder = write_tiny_step3(tmp_path, shards=3)
        (folder / "model.safetensors.index.json").unlink()
        check_same(plain, all_leaves(folder))

    def test_mtp_modules_are_known_and_not_loaded(self, tmp_path):
        sizes = TinyStep3(mtp=True, mtp_repeats_head=True)
        leaves = all_leaves(write_tiny_step3(tmp_path, sizes))
        assert len(leaves) == 1 + 2 + 2 * (6 + 3) + 2 * (7 + 6)

    def test_mtp_modules_may_be_left_out_as_a_whole(self, tmp_path):
        folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True))
        without_modules(folder, but=NORM)
        with pytest.raises(CheckpointError, match=r"missing model\.layers\.4\.eh_proj\.weight"):
            open_folder(folder)
        without_modules(folder)
        assert len(all_leaves(folder)) == 1 + 2 + 2 * (6 + 3) + 2 * (7 + 6)

    @pytest.mark.parametrize(
        ("but", "message"),
        [
            (None, r"1 problem:\n  no tensors of prediction module 1 of 1"),
            (NORM, r"missing model\.layers\.4\.eh_proj\.weight"),
        ],
    )
    def test_a_missing_prediction_module(self, but, message, tmp_path):
        folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True))
        without_modules(folder, but)
        with pytest.raises(CheckpointError, match=message):
            HFCheckpoint(folder, read_config(folder, modules=1)[1])

    def test_fewer_prediction_modules_than_asked_for(self, tmp_path):
        folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True))
        with pytest.raises(ConfigError, match=r"modules = 2, but the model has 1 modules"):
            read_config(folder, modules=2)

    def test_tied_head(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        with changed(folder) as tensors:
            del tensors["lm_head.weight"]
        edit_config(folder, tie_word_embeddings=True)
        leaves = all_leaves(folder)
        np.testing.assert_array_equal(leaves[2], leaves[0])


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stored", ["float32", "bfloat16"])
    def test_of_the_file_and_of_the_deployment(self, stored, dtype, tmp_path):
        table, *others = all_leaves(write_tiny_step3(tmp_path, dtype=stored), {"dtype": dtype})
        assert {leaf.dtype.name for leaf in others} == {dtype}
        expected = TinyStep3().tensors()["model.embed_tokens.weight"]
        if "bfloat16" in (stored, dtype):
            expected = expected.astype(ml_dtypes.bfloat16)
        assert table.dtype == dtype
        np.testing.assert_array_equal(table.astype(np.float32), expected.astype(np.float32))

    def test_float16(self, tmp_path):
        folder, name = write_tiny_step3(tmp_path), "model.embed_tokens.weight"
        with changed(folder) as tensors:
            tensors[name] = tensors[name].astype(np.float16)
            expected = tensors[name].astype(np.float32)
        np.testing.assert_array_equal(all_leaves(folder)[0], expected)


REPLACED = "was replaced by another version since this process started"


class TestReading:
    def test_says_how_much_it_read(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        opened, sizes = Opened(folder), []
        checkpoint = opened.source
        checkpoint.on_read = sizes.append
        leaves = opened.head()
        assert sizes == []  # nothing before it is asked for
        next(leaves)
        assert sizes == [64 * 4]
        next(leaves)
        assert sizes == [64 * 4, 160 * 64 * 4]
        assert checkpoint.size == 1_035_264

    @pytest.mark.parametrize(
        ("change", "message"),
        [("gone", "cannot be read: No such"), ("shorter", REPLACED), ("another", REPLACED)],
    )
    def test_a_file_that_changes_meanwhile(self, change, message, tmp_path):
        folder = write_tiny_step3(tmp_path)
        opened, path = Opened(folder), folder / "model.safetensors"
        if change == "gone":
            path.unlink()
        elif change == "shorter":
            path.write_bytes(path.read_bytes()[:5000])
        else:  # of the same size, with the same names at the same places
            write_tiny_step3(tmp_path / "other", seed=1)
            (tmp_path / "other" / path.name).replace(path)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors {message}"):
            list(opened.head())


def test_int4_of_fp32_is_not_rounded_before(tmp_path):
    """Scales are as exact as the files' numbers."""
    folder = write_tiny_step3(tmp_path)
    opened = Opened(folder, {"ffn.weights": "int4"})
    template = opened.templates.ffn[opened.config.layer(0).ffn]
    leaves = opened.on_one_device(template, opened.names.ffn[0])
    found = dict(zip(template.names, leaves, strict=True))
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    values, scales = found["dense.up.values"], found["dense.up.scales"]
    wanted = quantize_weight(jnp.asarray(stored), "int4", block_of(values.shape, scales.shape))
    np.testing.assert_array_equal(np.asarray(scales), np.asarray(wanted.scales))
    np.testing.assert_array_equal(
        np.asarray(values).astype(np.int8), np.asarray(wanted.values).astype(np.int8)
    )


def test_a_wrong_config_json(tmp_path):
    """`golden/checkpoint/config.txt` lists contents; None is no file."""

    def read(content: str) -> None:
        if content != "None":
            (tmp_path / "config.json").write_bytes(ast.literal_eval(content))
        read_config(tmp_path)

    golden.check_refused("checkpoint/config.txt", CheckpointError, read, tmp_path)


class TestBadFiles:
    def message(self, folder):
        with pytest.raises(CheckpointError) as error:
            open_folder(folder)
        return str(error.value)

    def test_all_problems_at_once(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        with changed(folder) as tensors:
            del tensors["model.norm.weight"], tensors["model.layers.2.moe.gate.weight"]
            tensors["model.layers.0.self_attn.wq.weight"] = np.zeros((48, 128), np.float32)
            tensors["model.layers.9.mlp.gate_proj.weight"] = np.zeros(3, np.float32)
            tensors["rotary.inv_freq"] = np.zeros(16, np.float32)
            tensors["lm_head.weight"] = np.zeros((160, 64), np.int8)
        message = self.message(folder).replace(str(folder), "FOLDER")
        golden.check("checkpoint/tensors.txt", message + "\n")

    def test_a_missing_shard(self, tmp_path):
        folder = write_tiny_step3(tmp_path, shards=3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        assert "1 problem:\n  model-00002-of-00003.safetensors is missing, and model.safe" in (
            self.message(folder)
        )

    def test_a_missing_shard_without_an_index(self, tmp_path):
        folder = write_tiny_step3(tmp_path, shards=3)
        index = folder / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"]
        index.unlink()
        (folder / "model-00002-of-00003.safetensors").unlink()
        gone = {name for name, path in files.items() if path.startswith("model-00002")}
        message = self.message(folder)
        assert f"{len(gone)} problems:" in message
        assert set(re.findall(r"missing (\S+)", message)) == gone

    def test_no_file(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        (folder / "model.safetensors").unlink()
        assert self.message(folder) == f"{folder}: no .safetensors file"

    def test_something_else(self, tmp_path):
        folder = write_tiny_step3(tmp_path)
        (folder / "words.safetensors").write_text("no tensors in here, just a few words\n")
        (folder / "folder.safetensors").mkdir()
        message = self.message(folder)
        for name in ("words", "folder"):
            assert f"{name}.safetensors: truncated or no safetensors" in message

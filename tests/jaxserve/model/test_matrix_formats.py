"""A BF16 checkpoint beside FP32 activations: on CPUs its matrices stay as they are."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.errors import ConfigError
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.pipelines import role_bytes
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.checkpoint.opened import Opened
from tests.reference.tiny_step3 import write_tiny_step3

IN_FLOAT32 = {"attention.weights": "float32", "ffn.weights": "float32"}
IN_BFLOAT16 = {"attention.weights": "bfloat16", "ffn.weights": "bfloat16"}
MATRICES = {"down", "up", "out", "gate", "weight", "table"}
"""Last parts of the names of leaves that are matrices, but for the router's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bfloat16")
    return write_tiny_step3(path, layouts.SIZES, seed=layouts.SEED, dtype="bfloat16")


def leaves(folder: Path, overrides: dict[str, Any]) -> dict[str, np.ndarray]:
    """The first layer's leaves with experts, embedding and head, by name."""
    opened = Opened(folder, overrides, on_cpus=True)
    outer, templates = opened.weights()[0], opened.templates
    found = dict(zip(templates.embedding.names, outer.embedding, strict=True))
    found |= dict(zip(templates.head.names, outer.head, strict=True))
    for layer, _, leaves in opened.blocks():
        found |= leaves if layer == 1 else {}
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def test_matrices_are_as_the_files_have_them(folder):
    kept, widened = leaves(folder, {}), leaves(folder, IN_FLOAT32)
    assert {leaf.dtype for leaf in widened.values()} == {np.dtype(np.float32)}
    for name, leaf in kept.items():
        last = name.rpartition(".")[2]
        narrow = last in MATRICES and not name.startswith("router.")
        assert leaf.dtype == (jnp.bfloat16 if narrow else np.float32), name
        np.testing.assert_array_equal(leaf.astype(np.float32), widened[name])
    assert leaves(folder, IN_BFLOAT16)["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("overrides", "attention", "ffn"),
    [
        ({}, 2, 2),
        (IN_BFLOAT16, 2, 2),
        (IN_FLOAT32, 4, 4),
        ({"ffn.weights": "float32"}, 2, 4),
        ({"dtype": "bfloat16"}, 2, 2),
    ],
    ids=str,
)
def test_bytes(folder, overrides, attention, ffn):
    """Bits of a value in matrices; norms, routers and the rest are in `dtype`."""
    config, _ = read_config(folder)
    deployment = layouts.deployment(folder, overrides)
    on_cpus = msgspec.structs.replace(config, platform="cpu")
    sizes = layouts.SIZES
    d, heads, latent = sizes.hidden_size, sizes.num_attention_heads * 32, sizes.share_q_dim
    matrices = 4 * (latent * d + 2 * 32 * d + heads * latent + d * heads) + 2 * 161 * d
    norms = 4 * (2 * d + latent) + d
    routers = 2 * 7 * d
    shared, dense = 3 * d * 42, 3 * d * 98
    in_ffn = 2 * (shared + 7 * 3 * d * 33) + 2 * dense
    wide = 2 if overrides.get("dtype") else 4
    parts = role_bytes(on_cpus, deployment)
    assert parts[0].weights == attention * matrices + wide * (norms + routers)
    assert parts[1].weights == ffn * in_ffn
    if "bfloat16" not in overrides.get("ffn.weights", ""):
        whole = [role.weights for role in role_bytes(config, deployment)]  # on anything else
        assert whole == [wide * (matrices + norms + routers), wide * in_ffn]


def test_only_cpus_mix(folder):
    config, _ = read_config(folder)
    for role in ("attention", "ffn"):
        deployment = layouts.deployment(folder, {f"{role}.weights": "bfloat16"})
        with pytest.raises(ConfigError, match=rf"{role}.weights = bfloat16 beside dtype = float32"):
            ModelTemplates(config, deployment, AbstractSubmeshes(deployment))
    with pytest.raises(ConfigError, match=r"ffn\.weights = float32 is not dtype = bfloat16"):
        layouts.deployment(folder, {"dtype": "bfloat16", "ffn.weights": "float32"})


class TestWhatFilesHave:
    """`ModelConfig.floats`: BF16 only where every matrix but the router's is."""

    @golden.table("model/tensors_in_float32.yaml")
    def test_one_tensor_in_float32(self, folder, tmp_path, widened, floats):
        tensors = load_file(folder / "model.safetensors")
        tensors[widened] = tensors[widened].astype(np.float32)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        assert read_config(tmp_path)[0].floats == floats

    def test_all_and_none(self, folder, tmp_path):
        assert read_config(folder)[0].floats == "bfloat16"
        sizes = dataclasses.replace(layouts.SIZES, num_hidden_layers=2, moe_layers=(1,))
        assert read_config(write_tiny_step3(tmp_path, sizes))[0].floats == "float32"
        (tmp_path / "model.safetensors").unlink()
        assert read_config(tmp_path)[0].floats == "float32"

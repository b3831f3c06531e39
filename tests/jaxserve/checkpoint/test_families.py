"""Tests that all families share: released models, spellings, problems, names of tensors."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.families import architecture, family_of
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.model import ModelConfig
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import CheckpointError
from tests import golden
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_deepseek_v4 import TinyDeepseekV4
from tests.reference.tiny_models import TinyModel, write_safetensors
from tests.reference.tiny_qwen3_next import TinyQwen3Next
from tests.reference.tiny_sizes import (
    TinyDeepseek,
    TinyGlm4,
    TinyGptOss,
    TinyIndexed,
    TinyMinimax,
    TinyQwen3,
    TinyStep3p5,
    Yarn,
)
from tests.reference.tiny_step3 import TinyStep3

TINY = [TinyDeepseek(), TinyQwen3(), TinyQwen3(model_type="qwen3_moe")]
TINY += [TinyIndexed(), TinyGlm4(), TinyMinimax(), TinyStep3(), TinyStep3p5(), TinyGptOss()]
NAMES = [tiny.config()["model_type"] for tiny in TINY]


def names_of(tree: dict[str, Any]) -> CheckpointNames:
    return family_of(tree["model_type"]).names(architecture(tree))


def shapes_of(names: CheckpointNames) -> dict[str, tuple[int, ...]]:
    """Every required tensor, with its shape."""
    shapes = dict(names.unloaded)
    for sources in (names.embedding, names.head, *names.attention, *names.ffn, *names.predictions):
        for source in sources.values():
            shapes |= dict(zip(source.names, source.shapes, strict=True))
    return shapes


@golden.table("checkpoint/released.yaml")
def test_released(name, billions):
    """Parameters as published, without those of prediction modules."""
    config, names = read_config(CONFIGS / "models" / name)
    golden.check(f"checkpoint/{name}.json", described(config))
    own = [shape for tensor, shape in shapes_of(names).items() if tensor not in names.unloaded]
    assert round(sum(map(math.prod, own)) / 1e9, 1) == billions


@pytest.mark.parametrize("yarn", [None, Yarn()], ids=["plain", "yarn"])
@pytest.mark.parametrize("tiny", TINY[:6], ids=NAMES[:6])
def test_transformers_5_spells_the_same(tiny, yarn):
    tiny = type(tiny)(**vars(tiny) | {"yarn": yarn})
    assert architecture(tiny.config("transformers 5")) == architecture(tiny.config())


@pytest.mark.parametrize("tiny", TINY, ids=NAMES)
class TestProblems:
    def message(self, tiny: Any, **entries: Any) -> str:
        with pytest.raises(CheckpointError) as error:
            architecture(tiny.config() | entries)
        return str(error.value)

    def test_problems_are_told_all_at_once(self, tiny):
        message = self.message(tiny, hidden_size="x", num_attention_heads=None, rms_norm_eps=0)
        for problem in ("hidden_size = 'x'", "num_attention_heads is missing", "rms_norm_eps = 0"):
            assert problem in message
        message = self.message(tiny, hidden_act="relu", soft_cap=30)
        assert "hidden_act = 'relu' is not supported, only 'silu'" in message
        assert "soft_cap = 30 is not known" in message

    def test_unknown_entries_that_are_off_or_ignored(self, tiny):
        tree = tiny.config()
        assert architecture(tree | {"gate": False, "sinks": None, "hooks": []}) == architecture(
            tree
        )
        assert architecture(tree | {"soft_cap": 30}, ["soft_cap"]) == architecture(tree)


FOUR = {"num_hidden_layers": 4}
BASES = {
    "deepseek": TinyDeepseek().config(),
    "indexed": TinyIndexed().config(),
    "glm_moe_dsa": TinyIndexed(model_type="glm_moe_dsa").config(),
    "qwen3": TinyQwen3(**FOUR).config(),
    "qwen3_moe": TinyQwen3(model_type="qwen3_moe", **FOUR).config(),
    "step3": TinyStep3().config(),
    "step3p5": TinyStep3p5().config(),
    "gpt_oss": TinyGptOss().config(),
    "deepseek_v4": TinyDeepseekV4().config(),
    "qwen3_next": TinyQwen3Next().config(),
}


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of a configuration by their dotted names."""
    if not isinstance(tree, dict):
        return {name: tree}
    return {k: v for key in tree for k, v in flat(tree[key], f"{name}.{key}".strip(".")).items()}


def described(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration; its layers as numbers of their specs, and each spec once."""
    tree: dict[str, Any] = msgspec.to_builtins(config, order="deterministic")
    kinds = config.decoder + config.predictors
    for field in ("attention", "ffn"):
        specs = list(dict.fromkeys(getattr(kind, field) for kind in kinds))
        for name in ("decoder", "predictors"):
            numbers = (specs.index(getattr(kind, field)) for kind in getattr(config, name))
            tree[f"{name}.{field}"] = " ".join(map(str, numbers))
        tree |= {f"{field}.{n}": msgspec.to_builtins(spec) for n, spec in enumerate(specs)}
    return {name: tree[name] for name in tree if name not in ("decoder", "predictors")}


def varied(line: str) -> tuple[ModelConfig, ModelConfig]:
    """A tiny model, and the same with other entries; null takes an entry away."""
    kind, entries = line.split(" ", 1)
    tree = {k: v for k, v in (BASES[kind] | json.loads(entries)).items() if v is not None}
    return architecture(BASES[kind]), architecture(tree)


def test_wrong_entries_of_each_family():
    """`golden/checkpoint/families.txt` lists them. None has a default: tools disagree."""
    golden.check_refused("checkpoint/families.txt", CheckpointError, varied)


def test_variations():
    """`golden/checkpoint/variations.txt` lists entries and what changes."""

    def said(line: str) -> str:
        configs = varied(line)
        before, after = (flat(described(c)) for c in configs)
        fields = {**before, **after}
        changed = [k for k in fields if before.get(k) != after.get(k)]
        return "\n".join(f"{k} = {after.get(k)}" for k in changed) or "nothing"

    golden.check_each("checkpoint/variations.txt", said)


def test_tensors_are_those_of_the_file():
    """The writer of tiny checkpoints has its own list of their tensors. A file lists the models,
    each with the number of its tensors."""

    def call(sizes: Any) -> int:
        names, there = names_of(sizes.config()), sizes.shapes()
        copies = {name: shape for name, shape in names.optional.items() if name in there}
        assert shapes_of(names) | copies == there
        return len(there)

    golden.check_values("checkpoint/tensor_names.txt", call, globals())


def test_copies_in_a_prediction_module_may_be_there():
    deepseek, step3 = TinyDeepseek(num_nextn_predict_layers=1), TinyStep3(mtp=True)
    for sizes, module, embedding in ((deepseek, 3, (97, 48)), (step3, 4, (160, 64))):
        copies = ("embed_tokens", "shared_head.head")
        expected = {f"model.layers.{module}.{copy}.weight": embedding for copy in copies}
        assert names_of(sizes.config()).optional == expected


@pytest.mark.parametrize("tiny", TINY, ids=NAMES)
def test_a_tied_head_is_the_embedding(tiny):
    names = names_of(tiny.config() | {"tie_word_embeddings": True})
    assert names.head["weight"].names == ("model.embed_tokens.weight",)
    repeated = {"lm_head.weight": (97, 48)} if isinstance(tiny, TinyQwen3) else {}
    assert names.optional.items() >= repeated.items()


def test_the_text_model_of_a_model_with_images(tmp_path):
    """Kimi K2.5 is Kimi K2 with a prefix, beside tensors for images that are passed over."""
    flat, whole = CATALOGUE["kimi_k2"].write(tmp_path / "text"), tmp_path / "whole"
    text = json.loads((flat / "config.json").read_text())
    tree = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"patch_size": 14}}
    tensors = load_file(flat / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(tree))
    save_file(named | {"vision_tower.x": np.ones(1)}, whole / "model.safetensors")
    config, names = read_config(whole)
    assert config == read_config(flat)[0]
    assert HFCheckpoint(whole, names).kind("language_model.lm_head.weight") == "F32"
    tree["text_config"] = text | {"quantization_config": {"quant_method": "x"}}
    with pytest.raises(CheckpointError, match=r"quantization_config.quant_method = 'x' is not"):
        architecture(tree)


def test_others_as_transformers_5_writes_them():
    tiny = TinyStep3p5(model_type="step3p7")
    entries = tiny.config("transformers 5")
    for key in ("norm_expert_weight", "use_head_wise_attn_gate"):
        del entries["text_config"][key]
    assert architecture(entries) == architecture(TinyStep3p5().config())
    assert architecture(TinyGptOss().config("transformers 5")) == architecture(
        TinyGptOss().config()
    )


def test_towers_of_step3p7_are_skipped(tmp_path):
    model = TinyModel("step3p7", TinyStep3p5(model_type="step3p7"))
    model.write(tmp_path)
    towers = ("vision_model.", "vit_large_projector.", "model.vision_model.")
    extra = {f"{tower}x.weight": np.zeros((2, 2), np.float32) for tower in towers}
    write_safetensors(tmp_path, model.tensors() | extra, 1)
    HFCheckpoint(tmp_path, read_config(tmp_path)[1])


def test_prediction_modules_of_minimax_are_skipped(tmp_path):
    """Tensors behind them are not."""
    model = CATALOGUE["minimax_m2"]
    model.write(tmp_path)
    _, names = read_config(tmp_path)
    extra = {"model.layers.5.eh_proj.weight": np.zeros((48, 96), np.float32)}
    write_safetensors(tmp_path, model.tensors() | extra, 1)
    HFCheckpoint(tmp_path, names)
    beyond = {"model.layers.6.eh_proj.weight": np.zeros((48, 96), np.float32)}
    write_safetensors(tmp_path, model.tensors() | beyond, 1)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.6\.eh_proj"):
        HFCheckpoint(tmp_path, names)

"""Every leaf of both modes, on every device, is what the checkpoint says."""

import dataclasses

import numpy as np
import pytest

from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.roles.colocated import ColocatedPrograms
from pallas_kernels import input_major
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.checkpoint.opened import Opened, leaves_of
from tests.reference.tiny_step3 import write_tiny_step3


def load(model, overrides, source=None, modules=0, input_major=False):
    """The opened model, and its weights: of attention and ffn, or colocated."""
    opened = Opened(model, overrides, modules=modules, on_cpus=input_major, source=source)
    return opened, *opened.weights()


def expected_leaves(layer: int | None, role: str, sizes=layouts.SIZES) -> dict[str, np.ndarray]:
    """Leaf name → the tensors of the file, side by side."""
    tensors = {
        name.removesuffix(".weight"): value for name, value in sizes.tensors(layouts.SEED).items()
    }
    if layer is None:
        return {
            "embedding": {"table": tensors["model.embed_tokens"]},
            "head": {"norm": tensors["model.norm"], "weight": tensors["lm_head"]},
        }[role]
    at = {
        name.removeprefix(f"model.layers.{layer}."): value
        for name, value in tensors.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    if role == "prediction":
        return {
            "token_norm": at["enorm"],
            "hidden_norm": at["hnorm"],
            "projection": at["eh_proj"],
            "norm": at["shared_head.norm"],
        }
    if role == "attention":
        leaves = {
            "input_norm": at["input_layernorm"],
            "attention.down": np.concatenate([at[f"self_attn.{part}_proj"] for part in "qkv"]),
            "attention.inter_norm": at["self_attn.inter_norm"],
            "attention.up": at["self_attn.wq"],
            "attention.out": at["self_attn.o_proj"],
            "post_norm": at["post_attention_layernorm"],
        }
        return leaves | ({"router.gate": at["moe.gate"]} if "moe.gate" in at else {})
    block = "share_expert" if "moe.gate" in at else "mlp"
    leaves = {f"dense.{part}": at[f"{block}.{part}_proj"] for part in ("gate", "up", "down")}
    if "moe.gate" in at:
        leaves |= {f"experts.{part}": at[f"moe.{part}_proj"] for part in ("gate", "up", "down")}
    return leaves


def row_by_row(tiled):
    """A leaf of tiles, [..., tiles, d_in, width], as [..., d_out, d_in]."""
    tiled = np.swapaxes(np.asarray(tiled), -1, -2)
    *outer, tiles, width, d_in = tiled.shape
    return tiled.reshape(*outer, tiles * width, d_in)


def check(template, leaves, expected):
    assert set(template.names) == set(expected)
    for known, leaf in zip(template.leaves, leaves, strict=True):
        name = known.name
        assert leaf.shape[-len(known.shape) :] == known.shape
        leaf = row_by_row(leaf) if known.input_major else leaf
        padded = np.zeros(leaf.shape, np.float32)
        if known.of_slots:
            for slot, expert in enumerate(template.entries["expert_slots"]):
                if expert >= 0:
                    one = expected[name][expert]
                    padded[(slot, *(slice(size) for size in one.shape))] = one
        else:
            padded[tuple(slice(size) for size in expected[name].shape)] = expected[name]
        np.testing.assert_array_equal(np.asarray(leaf), padded, err_msg=name)


# Of the sizes in `layouts.py` no axis divides: every one of these pads experts, d_ff or vocab.
@golden.table("roles/loaded_layouts.yaml")
def test_afd(tiny_model, overrides):
    opened, attention, ffn = load(tiny_model, overrides)
    templates = opened.templates
    check(templates.embedding, attention.embedding, expected_leaves(None, "embedding"))
    check(templates.head, attention.head, expected_leaves(None, "head"))
    for layer, leaves in enumerate(zip(attention.layers, ffn.blocks, strict=True)):
        kind = opened.config.layer(layer)
        check(templates.attention[kind], leaves[0], expected_leaves(layer, "attention"))
        check(templates.ffn[kind.ffn], leaves[1], expected_leaves(layer, "ffn"))
    assert layer == 3


def test_devices_hold_their_slices_alone(tiny_model):
    sizes = {"attention.tp": 2, "ffn.ep": 2, "ffn.tp": 2}
    opened, attention_weights, ffn_weights = load(tiny_model, sizes)
    ffn = dict(zip(opened.templates.moe.names, ffn_weights.blocks[1], strict=True))
    shards = {name: {s.data.shape for s in leaf.addressable_shards} for name, leaf in ffn.items()}
    assert shards == {
        "experts.gate": {(4, 17, 64)},  # 7 of 8 experts, 33 of 34 columns
        "experts.up": {(4, 17, 64)},
        "experts.down": {(4, 64, 17)},
        "dense.gate": {(11, 64)},  # 42 of 44 columns
        "dense.up": {(11, 64)},
        "dense.down": {(64, 11)},
    }
    assert [s.device.id for s in ffn["experts.gate"].addressable_shards] == [2, 3, 4, 5]
    attention = opened.templates.attention[opened.config.layer(1)]
    leaves = dict(zip(attention.names, attention_weights.layers[1], strict=True))
    assert {s.data.shape for s in leaves["attention.up"].addressable_shards} == {(64, 48)}
    assert {s.data.shape for s in leaves["attention.out"].addressable_shards} == {(64, 64)}
    assert {s.data.shape for s in leaves["attention.down"].addressable_shards} == {(112, 64)}


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention.dp": 2, "attention.tp": 2}, {"attention.dp": 3, "ffn.redundant_slots": 1}],
    ids=str,
)
def test_colocated_stacks_are_the_layers(tiny_model, overrides):
    opened, weights = load(tiny_model, layouts.COLOCATED | overrides)
    templates, flat = opened.templates, list(weights.flat)

    def take(template):
        nonlocal flat
        leaves, flat = flat[: len(template.leaves)], flat[len(template.leaves) :]
        return leaves

    check(templates.embedding, take(templates.embedding), expected_leaves(None, "embedding"))
    check(templates.head, take(templates.head), expected_leaves(None, "head"))
    for kind, start, stop in opened.config.runs():
        roles = {"attention": templates.attention[kind], "ffn": templates.ffn[kind.ffn]}
        for role, template in roles.items():
            stacks = take(template)
            for layer in range(start, stop):
                leaves = [np.asarray(stack)[layer - start] for stack in stacks]
                check(template, leaves, expected_leaves(layer, role))
    assert flat == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention.tp": 2, "ffn.ep": 3, "ffn.redundant_slots": 1},
        {"ffn.ep": 2, "ffn.tp": 2},
        layouts.COLOCATED | {"attention.dp": 2, "attention.tp": 2},
    ],
    ids=str,
)
def test_input_by_input(tiny_model, overrides, monkeypatch):
    """All matrices, and those of the other tests with their rows in several tiles."""
    monkeypatch.setattr(input_major, "TILE", 16)
    _, *plain = load(tiny_model, overrides)
    opened, *weights = load(tiny_model, overrides, input_major=True)
    if "ffn.ep" in overrides:
        own, kind = opened.templates, opened.config.layer(1)
        check(own.attention[kind], weights[0].layers[1], expected_leaves(1, "attention"))
        check(own.moe, weights[1].blocks[1], expected_leaves(1, "ffn"))
    pairs = zip(leaves_of(plain), leaves_of(weights), strict=True)
    most, tiled = 0, 0
    for leaf, made in pairs:
        if leaf.shape == made.shape:
            np.testing.assert_array_equal(leaf, made)
        else:
            np.testing.assert_array_equal(leaf, row_by_row(made))
            most, tiled = max(most, made.shape[-3]), tiled + 1
    assert tiled >= 10
    assert most >= 4


@pytest.fixture(scope="module")
def with_module(tmp_path_factory):
    return write_tiny_step3(
        tmp_path_factory.mktemp("mtp"), TestPredictionModules.SIZES, seed=layouts.SEED
    )


class TestPredictionModules:
    SIZES = dataclasses.replace(layouts.SIZES, mtp=True, mtp_repeats_head=True)
    ROLES = ("prediction", "attention", "ffn")

    def check(self, opened, blocks):
        templates, kind = opened.templates, opened.config.layer(4)
        own = templates.prediction, templates.attention[kind], templates.moe
        for role, template, leaves in zip(self.ROLES, own, blocks, strict=True):
            check(template, leaves, expected_leaves(4, role, self.SIZES))

    def test_afd(self, with_module):
        sizes = {"attention.tp": 2, "ffn.ep": 3}
        opened, attention, ffn = load(with_module, sizes, modules=1)
        assert (len(attention.layers), len(ffn.blocks)) == (5, 5)
        self.check(opened, (attention.predictions[0], attention.layers[4], ffn.blocks[4]))

    def test_colocated(self, with_module):
        overrides = layouts.COLOCATED | {"attention.dp": 2, "attention.tp": 2}
        opened, weights = load(with_module, overrides, modules=1)
        stacks = weights.modules[len(weights.embedding + weights.head) :]
        leaves = [np.asarray(stack)[0] for stack in stacks]
        first, rest = len(opened.templates.prediction.leaves), len(opened.templates.moe.leaves)
        self.check(opened, (leaves[:first], leaves[first:-rest], leaves[-rest:]))
        given = opened.templates, opened.deployment, opened.meshes.attention
        banks = ColocatedPrograms(*given).banks
        assert banks[-1].layers == (4,)
        assert weights.blocks[-1] == stacks[-rest:]

    def test_only_those_that_are_asked_for(self, with_module):
        _, attention, ffn = load(with_module, {})
        assert (len(attention.layers), len(ffn.blocks), attention.predictions) == (4, 4, [])
        _, weights = load(with_module, layouts.COLOCATED)
        assert weights.modules == weights.embedding + weights.head


def test_random_leaves_are_the_same_every_time(tiny_model):
    first, again = (load(tiny_model, {}, RandomLeaves(3))[2].blocks for _ in range(2))
    for a, b in zip(first[1], again[1], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not np.array_equal(np.asarray(first[1][0]), np.asarray(first[2][0]))

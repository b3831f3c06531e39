"""Shapes and shares of the programs; what they compute is compared in `test_layouts.py`."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.checkpoint.families import architecture
from jaxserve.model import message as quant_rows
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.colocated import ColocatedPrograms
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.layout import Bucket
from jaxserve.roles.whole_steps import StackedLeaves
from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.quantize import StackEntry
from pallas_kernels.target import Target, use_target
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of


def programs(tmp_path, cls=LayerPrograms, sizes=layouts.SIZES, **overrides):
    overrides = {key.replace("__", "."): value for key, value in overrides.items()}
    if cls is ColocatedPrograms:
        overrides |= layouts.COLOCATED
    return programs_of(cls, layouts.deployment(tmp_path, overrides), architecture(sizes.config()))


def test_padding_has_the_id_past_the_experts_whatever_the_ffn_mesh(tmp_path):
    assert programs(tmp_path).sentinel == 7
    assert programs(tmp_path, ffn__ep=2).sentinel == 7
    assert programs(tmp_path, ColocatedPrograms, attention__dp=3).sentinel == 7


def test_shapes_of_1a1f(tmp_path):
    p = programs(tmp_path, link__dispatch="int8")
    bucket, pages = Bucket(24, 18), (160, 1, 8, 32)
    enter = p.enter(bucket, p.config.layer(0))
    assert enter.name == "enter_dense"
    expected = [(1, 5), (1, 5, 18), (1, 24 + 6 + 1 + 7 * 5), pages, pages]
    assert [a.shape for a in enter.arguments[:5]] == expected
    assert enter.donated == (3, 4)
    attend = p.attend(bucket, p.config.layer(1))
    # Slots, positions and chunk starts of the tokens, cosines and sines of their angles: what
    # `enter` made of the batch.
    shared = [(24,), (24,), (24,), (24, 16), (24, 16)]
    expected = [(24, 64), (1, 5, 18), *shared, pages, pages, (24, 64)]
    assert [a.shape for a in attend.arguments[:10]] == expected
    assert attend.donated == (0, 7, 8)
    made = jax.eval_shape(enter.mapped(), *enter.arguments)
    assert [array.shape for array in made[4:]] == shared
    p_ffn = programs(tmp_path, FFNPrograms, link__dispatch="int8")
    packed = p_ffn.ffn(Bucket(24, 1), p.config.moe).arguments[0]
    # 64 values, a scale of 4 bytes, three ids and three gates of 4 bytes.
    assert (packed.shape, packed.dtype) == ((24, 64 + 4 + 12 + 12), jnp.uint8)
    assert p_ffn.ffn(Bucket(24, 1), p.config.layer(0).ffn).arguments[0].shape == (24, 64 + 4)
    assert p.leave(bucket).arguments[3].shape == (24, 64)


def test_answers_in_int8_have_a_scale_behind_them(tmp_path):
    p, bucket = programs(tmp_path, link__combine="int8"), Bucket(24, 18)
    for answer in (p.attend(bucket, p.config.layer(1)).arguments[9], p.stream_shapes(bucket)[1]):
        assert (answer.shape, answer.dtype) == ((24, 64 + 4), jnp.int8)
    assert p.leave(bucket).arguments[3].shape == (24, 64 + 4)


@pytest.mark.parametrize(
    ("layout", "rows", "answers", "ranks"),
    # 24 tokens a DP group; a piece an attention device, one array a slot of the ffn devices.
    [("3A2F", 72, [(48, 64)] * 2, 2), ("2A4F", 24, [(48, 64)], 2), ("1A2F tp", 24, [(48, 64)], 1)],
)
def test_pieces_are_the_attention_mesh_s(layout, rows, answers, ranks, tmp_path):
    overrides = {k.replace(".", "__"): v for k, v in layouts.LAYOUTS[layout].items()}
    attention = programs(tmp_path, **overrides)
    attend = attention.attend(Bucket(24, 18), attention.config.layer(1))
    message = jax.eval_shape(attend.mapped(), *attend.arguments)[1]
    assert message.shape == (rows, 64 + 3 + 3)
    ffn = programs(tmp_path, FFNPrograms, **overrides).ffn(Bucket(24, 1), attention.config.moe)
    *made, counts = jax.eval_shape(ffn.mapped(), *ffn.arguments)
    assert [array.shape for array in made] == answers
    assert counts.shape == (1, ranks, 7)
    assert ffn.donated == (len(answers) + 1,)


@golden.table("roles/norm_quantises.yaml")
def test_norm_quantises_for_the_link(overrides, calls, tmp_path, monkeypatch):
    seen = []

    def op(*arguments):
        seen.append(arguments)
        return rms_norm_quantize(*arguments)

    monkeypatch.setattr(quant_rows, "rms_norm_quantize", op)
    made = programs(tmp_path, **overrides)
    program = made.attend(Bucket(24, 18), made.config.layer(1))
    jax.eval_shape(program.mapped(), *program.arguments)
    assert len(seen) == calls


@pytest.mark.parametrize(("backend", "whole"), [("mosaic_tpu", True), ("reference", False)])
def test_kernels_of_tpus_find_quantised_matrices_in_their_stacks(backend, whole, tmp_path):
    made = programs(tmp_path, ColocatedPrograms, attention__weights="int8", ffn__weights="int8")
    block = made.templates.attention[made.config.layer(1)]
    arrays = [jnp.zeros((2, *leaf.shape), leaf.dtype) for leaf in block.leaves]
    with use_target(Target(backend, "TPU v6 lite")):
        stack = StackedLeaves.of(block, arrays)
    layer = stack.at(1)
    parts = {name.rpartition(".")[0] for name in block.names if name.endswith(".values")}
    assert len(parts) >= 3
    for name, leaf in zip(block.names, layer, strict=True):
        assert isinstance(leaf, StackEntry) == (whole and name.rpartition(".")[0] in parts), name
    assert [leaf.shape for leaf in layer] == [leaf.shape for leaf in block.leaves]

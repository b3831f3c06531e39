"""Both ends' arithmetic agrees with the formats that the programs use."""

import msgspec
import pytest

from jaxserve.checkpoint.families import architecture
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.dispatch.message import message_formats
from jaxserve.model.row_width import deployment_row_bytes
from tests.jaxserve import layouts


def contract(tmp_path, **overrides):
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return Contract.of(architecture(layouts.SIZES.config()), layouts.deployment(tmp_path, keys))


@pytest.mark.parametrize("dispatch", ["float32", "fp8", "int8"])
def test_rows_have_the_bytes_that_capacity_counts(dispatch, tmp_path):
    deployment = layouts.deployment(tmp_path, {"link.dispatch": dispatch})
    config = architecture(layouts.SIZES.config())
    formats = message_formats(Contract.of(config, deployment))
    assert list(formats) == ["dense", "moe"]
    counted = deployment_row_bytes(config, deployment).packed
    assert counted == formats["moe"].width * formats["moe"].word.itemsize


def test_pieces(tmp_path):
    made = contract(tmp_path, attention__dp=3, attention__tp=2)
    assert made.attention_devices == 6
    assert made.piece_rows(24) == 12
    assert made.size(24) == (6, 12, 1)
    assert made.of_pieces(2, 4).size(24) == (2, 24, 4)
    with pytest.raises(ValueError, match="69 rows cannot be cut into 6 equal pieces"):
        made.piece_rows(23)


def test_meshes_of_other_sizes_agree(tmp_path):
    """One ffn worker serves domains of all sizes."""
    assert contract(tmp_path) == contract(tmp_path, ffn__ep=5, ffn__tp=3)
    assert contract(tmp_path).facts() == contract(tmp_path, attention__dp=3).facts()


def test_every_difference_changes_the_facts(tmp_path):
    made = contract(tmp_path)
    changes = [{"d_model": 32}, {"top_k": 1}, {"dispatch": "int8"}, {"layers": ("moe",)}]
    changes += [{"combine": "bfloat16"}, {"combine": "int8"}]
    facts = [msgspec.structs.replace(made, **change).facts() for change in ({}, *changes)]
    assert len({str(one) for one in facts}) == 7

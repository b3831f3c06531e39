"""config.json of Step-3; `test_families.py` has what all families share."""

import pytest

from jaxserve.checkpoint.families import architecture
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.errors import CheckpointError
from tests.reference.tiny_step3 import TinyStep3

CONFIG = TinyStep3().config()
VISION = TinyStep3().config(vision=True)


def test_entries_of_the_vision_model_are_passed_over():
    images = {
        *("im_end_token", "im_patch_token", "im_start_token", "image_token_len"),
        *("patch_token_len", "projector_bias", "understand_projector_stride"),
        *("use_im_start_end", "vision_select_layer"),
    }
    assert architecture(VISION | dict.fromkeys(images, 7)) == architecture(CONFIG)
    assert architecture(CONFIG | {"text_config": None}) == architecture(CONFIG)


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_quantisation_is_said_outside_or_inside(place):
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tree = VISION | said
    if place == "inside":
        tree = VISION | {"text_config": VISION["text_config"] | said}
    assert architecture(tree).stored == "fp8_block"


def test_the_text_models_entries_are_read_strictly():
    tree = VISION | {"text_config": VISION["text_config"] | {"sliding_window": 512}}
    with pytest.raises(CheckpointError, match="sliding_window = 512 is not known"):
        architecture(tree)
    assert architecture(tree, ["sliding_window"]) == architecture(VISION)


def test_no_shared_expert():
    names = step3_names(architecture(CONFIG | {"share_expert_dim": 0}))
    assert set(names.ffn[1]) == {"experts.gate", "experts.up", "experts.down"}

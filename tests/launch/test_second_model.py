"""The second model: its template, and a head whose first column acts as a bias."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.text.answer_format import AnswerMarkers
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from launch import second_model

CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]


@pytest.mark.parametrize("thinks", [False, True])
def test_template(tmp_path: Path, thinks: bool) -> None:
    folder = second_model.write(tmp_path, thinks=thinks).parent
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    form = AnswerMarkers.of(template)
    assert form.thinks == thinks
    assert form.calls is not None
    assert form.calls.begin == "<tool_call>"
    text = template.render(CHAT, tools=None, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{'<think>' if thinks else ''}"
    ) + ("\n" if thinks else "")
    ids = Tokenizer.from_folder(folder).encode("<think>x<|im_end|>", add_bos=False)
    assert (ids[0], ids[-1], len(ids)) == (3074, 3073, 3)


def test_head(tmp_path: Path) -> None:
    second_model.write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {"lm_head.weight", "model.layers.1.self_attn.q_norm.weight"} <= set(weights)
    assert np.all(weights["model.layers.0.mlp.down_proj.weight"][0] == 0)
    column = weights["lm_head.weight"][:, 0]
    assert column[3078] < -30 < 0 < column[3073]  # without a text, the end of an answer
    assert column[18] == column[2721] < -1.5 < column[14] == 0  # 1, 200, minus

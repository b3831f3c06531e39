"""A vocabulary in tiktoken's format, small enough for tests: all bytes and some merges."""

import base64
import json
from pathlib import Path

from jaxserve.config.special_tokens import AddedToken

MERGES = (
    "he|ll|llo|hello| w|or|ld| world|th|the| the|in|ing|  |    |\n\n|12|123|中|文|中文|你|你好|é|"
    "aa|aaa|aaaa|'s|\r\n|ab|abab|ba|Eng|lish|\U0001f642|..|..."
)
EXTRA = [b"\xe4\xbd", b"\xf0\x9f", b"\xf0\x9f\x99"]
"""Parts of characters: tokens that have no text of their own."""

TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *EXTRA,
    *(token.encode() for token in MERGES.split("|")),
]
RANKS = {token: rank for rank, token in enumerate(dict.fromkeys(TOKENS))}
BASE = len(RANKS)
"""The first added id."""

ADDED = {
    BASE: AddedToken("[BOS]", special=True),
    BASE + 1: AddedToken("[EOS]", special=True),
    BASE + 2: AddedToken("<|im_end|>", special=True),
    BASE + 3: AddedToken("<|im_user|>", special=True),
    BASE + 4: AddedToken("<|im_middle|>", special=True),
    BASE + 5: AddedToken("<|tool_call_begin|>"),
    BASE + 9: AddedToken("[PAD]", special=True),
}


def write_ranks_folder(folder: Path, **config: object) -> Path:
    """A folder as Kimi K2's, without weights."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    names = {
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special, "lstrip": False}
            for token_id, token in ADDED.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BASE + 2}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": BASE + 10, **config}))
    return folder
